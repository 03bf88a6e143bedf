"""The folder that a calibration writes: its files' names, and that one run at a time has it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.part import disk_error, written

IMATRIX_NAME = "imatrix.gguf"
WINSORIZED_NAME = "imatrix-winsorized.gguf"


@contextmanager
def output_folder(folder: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """Makes the folder and keeps it for this process; when the work fails before it wrote anything, a new folder goes again.

    names: files that will be written there. Raises MachineLacks when another run writes there, UsageError when one of them cannot be.
    """
    if str(folder) == "-":
        raise UsageError("the output - is a pipe, not a folder", "name a folder with -o")
    made = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise UsageError(f"{folder.parent}: {error.strerror}", "the folder of the output must exist") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"the output {folder} is a file", "name a folder with -o") from error
    except OSError as error:
        raise disk_error(folder, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise MachineLacks(f"{folder} is being written by another run", "wait for it, or write elsewhere with -o") from error
    try:
        _check(folder, names)
        yield folder
    except BaseException:
        if made:
            with suppress(OSError):  # it holds what can be continued
                folder.rmdir()
        raise
    finally:
        os.close(descriptor)


def _check(folder: Path, names: Sequence[str]) -> None:
    """Before the long work instead of after it."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: no right to write there", "choose a folder that can be written")
    for name in names:
        written(folder / name)
