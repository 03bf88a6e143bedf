"""Whether a source is still the one that an interrupted run was reading, told in a fraction of a second."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from a3b_gguf import __version__
from a3b_gguf.errors import BadInput

WHOLE_BYTES = 64 << 20  # files up to this size are read whole: every config and tokenizer
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a larger one: pieces at even distances, the first and the last among them
MAKERS = ("llama-cpp-python", "numba", "numpy")  # another version of these, or of a3b, may write other bytes from the same source


def fingerprint(files: Iterable[Path], *made_with: str) -> bytes:
    """32 bytes that change when a file or `made_with` (how the output is made from them) does.

    Covered: names, sizes, times of the last change, all content of files up to 64 MiB, and of larger ones 64 samples of 64 KiB. An edit
    of a large file that keeps size and time and misses every sample goes unseen; no program does that by accident. A file that was
    only touched or copied counts as another one: then the work starts again. Folders do not matter.
    """
    digest = hashlib.sha256(repr((made_with, __version__, [version(name) for name in MAKERS])).encode())
    for path in sorted(files, key=lambda path: path.name):
        try:
            about = path.stat()
            digest.update(repr((path.name, about.st_size, about.st_mtime_ns)).encode())
            with path.open("rb") as data:
                _add(digest, data, about.st_size)
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}", "check the file") from error
    return digest.digest()


def _add(digest: hashlib._Hash, data: BinaryIO, size: int) -> None:
    if size <= WHOLE_BYTES:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
        return
    for number in range(SAMPLES):
        data.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
        digest.update(data.read(SAMPLE_BYTES))
