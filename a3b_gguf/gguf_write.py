"""Writes a GGUF file: header first with final sizes, then the tensors in order, then one atomic rename.

The bytes go to a sibling `NAME.part`; the final name appears only when everything is on disk. Layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.gguf_file import DEFAULT_ALIGNMENT, MAGIC
from a3b_gguf.metadata import KINDS, Field, Metadata
from a3b_gguf.tensors import TensorJob
from a3b_gguf.units import human_bytes

# (bytes written, bytes in all, name of the tensor being written)
Progress = Callable[[int, int, str], None]


def header(metadata: Metadata, jobs: Sequence[TensorJob], alignment: int = DEFAULT_ALIGNMENT) -> tuple[bytes, list[int]]:
    """The bytes before the first tensor, padded, and each tensor's offset from the end of them."""
    parts = [MAGIC, struct.pack("<IQQ", 3, len(jobs), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), *_value(value)]
    offsets, offset = [], 0
    for job in jobs:
        parts.append(_text(job.name))
        parts.append(struct.pack(f"<I{len(job.shape)}QIQ", len(job.shape), *reversed(job.shape), job.type.number, offset))
        offsets.append(offset)
        offset += _padded(job.nbytes, alignment)
    data = b"".join(parts)
    return data.ljust(_padded(len(data), alignment), b"\0"), offsets


def file_size(metadata: Metadata, jobs: Sequence[TensorJob], alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes of the file that `write_gguf` would write, exactly."""
    return len(header(metadata, jobs, alignment)[0]) + sum(_padded(job.nbytes, alignment) for job in jobs)


def write_gguf(path: Path, metadata: Metadata, jobs: Sequence[TensorJob], progress: Progress | None = None) -> int:
    """Writes `path` and returns its size in bytes.

    Raises MachineLacks when the disk is too small, before the first byte or when it fills up on the way; whatever is
    raised, also by a job's chunks, nothing stands under the final name and the `.part` is gone.
    """
    start, _ = header(metadata, jobs)
    total = file_size(metadata, jobs)
    with part_file(path, total) as out:
        out.write(start)
        done = len(start)
        for job in jobs:
            wrote = 0
            for chunk in job.chunks():
                out.write(chunk)
                wrote += len(chunk)
                if progress:
                    progress(done + wrote, total, job.name)
            if wrote != job.nbytes:
                raise RuntimeError(f"{job.name}: {wrote} bytes written, {job.nbytes} promised")
            out.write(bytes(_padded(wrote, DEFAULT_ALIGNMENT) - wrote))
            done += _padded(wrote, DEFAULT_ALIGNMENT)
    return total


@contextmanager
def part_file(path: Path, n_bytes: int) -> Iterator[BinaryIO]:
    """Opens `path` + ".part" for writing; on success it is synced and renamed to `path`, on failure removed."""
    part = path.with_name(path.name + ".part")
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise UsageError(f"{path.parent}: {error.strerror}", "the folder of the output must exist") from error
    if n_bytes > free:
        needs = f"{path} needs {human_bytes(n_bytes)}, its disk has {human_bytes(free)} free"
        raise MachineLacks(needs, "free some space or write elsewhere")
    try:
        with part.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(path, error) from error
        raise


def disk_error(path: Path, error: OSError) -> MachineLacks | UsageError:
    """What an OSError of writing means to the user."""
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return MachineLacks(f"{path}: {error.strerror} while writing; nothing was left behind", "free some space or write elsewhere")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR):
        return UsageError(f"{path}: {error.strerror}", "choose a place that can be written")
    return MachineLacks(f"{path}: {error.strerror or error}", "nothing was left behind; look at the disk, then try again")


def refuse_same_file(output: Path, sources: Iterable[Path]) -> None:
    """Raises UsageError when `output` is one of `sources`, also through links."""
    for source in sources:
        if output.exists() and source.exists() and os.path.samefile(output, source):
            raise UsageError(f"the output {output} is the input {source}", "choose another name with -o")


def _sync_folder(folder: Path) -> None:
    """Makes the rename durable, where folders can be synced (not on Windows)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Field) -> Iterator[bytes]:
    number = KINDS[value.kind][0]
    if value.kind != "arr":
        yield struct.pack("<I", number) + _scalar(value.kind, value.value)
        return
    yield struct.pack("<IIQ", number, KINDS[value.item][0], len(value.value))
    if value.item == "str":
        yield from map(_text, value.value)
    else:
        yield struct.pack(f"<{len(value.value)}{KINDS[value.item][1]}", *value.value)


def _scalar(kind: str, value: Any) -> bytes:
    return _text(value) if kind == "str" else struct.pack("<" + KINDS[kind][1], value)
