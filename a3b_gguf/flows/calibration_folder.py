"""The folder that a calibration writes: its files' names, and that one run at a time has it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.part import disk_error

IMATRIX_NAME = "imatrix.gguf"
WINSORIZED_NAME = "imatrix-winsorized.gguf"


@contextmanager
def output_folder(folder: Path) -> Iterator[Path]:
    """Makes the folder and keeps it for this process. Raises MachineLacks when another run writes there."""
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
        yield folder
    finally:
        os.close(descriptor)
