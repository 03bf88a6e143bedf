"""Writes GGUF files: header first with final sizes, then the tensors in order, then atomic renames.

The bytes go to a sibling `NAME.part` (part.py); a final name appears only when everything is on disk, of a split model when all files
are. Layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from a3b_gguf.errors import Interrupted, MachineLacks, UsageError
from a3b_gguf.gguf_file import DEFAULT_ALIGNMENT, MAGIC
from a3b_gguf.metadata import KINDS, Field, Metadata
from a3b_gguf.part import Part, check_space, disk_error
from a3b_gguf.split import MOST_SHARDS, shard_metadata, shard_path
from a3b_gguf.tensors import TensorJob
from a3b_gguf.units import human_bytes

# (bytes written, bytes in all, name of the tensor being written)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that will be written. start: its header, padded; n_bytes: of the whole file, exactly."""

    path: Path
    start: bytes
    jobs: tuple[TensorJob, ...]
    n_bytes: int

    @property
    def ends(self) -> list[int]:
        """Where the header ends, and each tensor with its padding."""
        return list(accumulate((_padded(job.nbytes, DEFAULT_ALIGNMENT) for job in self.jobs), initial=len(self.start)))


@dataclass(frozen=True, slots=True)
class FileLine:
    """A file of the output and its exact size."""

    path: Path
    n_bytes: int


def file_lines(files: Sequence[OutputFile]) -> tuple[FileLine, ...]:
    return tuple(FileLine(file.path, file.n_bytes) for file in files)


def header(metadata: Metadata, jobs: Sequence[TensorJob], alignment: int = DEFAULT_ALIGNMENT) -> tuple[bytes, list[int]]:
    """The bytes before the first tensor, padded, and each tensor's offset from the end of them."""
    parts = [_fields(metadata, len(jobs))]
    offsets, offset = [], 0
    for job in jobs:
        parts.append(_entry(job, offset))
        offsets.append(offset)
        offset += _padded(job.nbytes, alignment)
    data = b"".join(parts)
    return data.ljust(_padded(len(data), alignment), b"\0"), offsets


def file_size(metadata: Metadata, jobs: Sequence[TensorJob], alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes of the file that `write_gguf` would write, exactly."""
    return len(header(metadata, jobs, alignment)[0]) + sum(_padded(job.nbytes, alignment) for job in jobs)


def lay_out(path: Path, metadata: Metadata, jobs: Sequence[TensorJob], max_bytes: int | None = None) -> tuple[OutputFile, ...]:
    """The files that hold the model: `path` alone, or with `max_bytes` as many shards as it takes.

    A shard is larger than `max_bytes` only when it holds a single tensor. Raises UsageError when there would be too many.
    """
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"--max-shard-size: {max_bytes} bytes are no size", "write it like 4G")
    groups = [list(jobs)] if max_bytes is None else _groups(metadata, jobs, max_bytes)
    if len(groups) == 1:
        return (_output(path, metadata, groups[0]),)
    if len(groups) > MOST_SHARDS:
        raise UsageError(f"--max-shard-size: {max_bytes:,} bytes make {len(groups):,} files, at most {MOST_SHARDS:,} can be", "take more")
    files = []
    for number, group in enumerate(groups, 1):
        own = shard_metadata(number, len(groups), len(jobs))
        shard = shard_path(path, number, len(groups))
        files.append(_output(shard, {**metadata, **own} if number == 1 else own, group))
    return tuple(files)


def write_gguf(path: Path, metadata: Metadata, jobs: Sequence[TensorJob], progress: Progress | None = None) -> int:
    """Writes `path` as one file and returns its size in bytes. Raises as `write_files` does; nothing is ever left to be continued."""
    write_files([_output(path, metadata, jobs)], progress)
    return path.stat().st_size


def write_files(files: Sequence[OutputFile], progress: Progress | None = None, key: bytes = b"") -> tuple[str, ...]:
    """Writes all files and returns what the user should know about it.

    key: what the tensors are made from (fingerprint.py); what an interrupted run with the same key and the same headers left is
    continued after its last whole tensor that is on disk. Without a key every run starts anew.
    Raises MachineLacks when the disk is too small, before the first byte or when it fills up on the way, or when another run
    writes the same file. Then, and after Ctrl-C (raised as Interrupted), a part that has a whole tensor stays for the next run.
    Whatever else is raised, also by a job's chunks, leaves no part. Nothing stands under a final name in any case.
    """
    check_space(files[0].path, 0)
    parts: list[Part] = []
    try:
        for file in files:
            parts.append(Part(file.path, hashlib.sha256(key + file.start).digest(), file.ends if key else []))
        notes = _notes(parts)
        _write(files, parts, progress)
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted; {_synced(parts)}") from error
    except OSError as error:
        raise disk_error(files[0].path, error, _synced(parts)) from error
    except MachineLacks:
        _keep(parts)
        raise
    except BaseException:
        for part in parts:
            part.remove()
        raise
    finally:
        for part in parts:
            part.close()
    return notes


def _write(files: Sequence[OutputFile], parts: Sequence[Part], progress: Progress | None) -> None:
    total = sum(file.n_bytes for file in files)
    check_space(files[0].path, total - sum(part.trusted for part in parts))
    done = 0
    for file, part in zip(files, parts, strict=True):
        _fill(file, part, progress and _shifted(progress, done, total))
        done += file.n_bytes
    for file, part in zip(files, parts, strict=True):
        part.finish(file.start, file.n_bytes)
    for part in parts:
        part.rename()


def _fill(file: OutputFile, part: Part, tell: Callable[[int, str], None] | None) -> None:
    """Writes every tensor that the part does not have yet."""
    have = part.begin(file.start)
    for job, (start, end) in zip(file.jobs, pairwise(file.ends), strict=True):
        if end <= have:
            continue
        at = start
        for chunk in job.chunks():
            at = part.write(at, chunk)
            if tell:
                tell(at, job.name)
        if at - start != job.nbytes:
            raise RuntimeError(f"{job.name}: {at - start} bytes written, {job.nbytes} promised")
        part.write(at, bytes(end - at))
        part.mark(end)


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int, str], None]:
    """Progress of one file as progress of all."""
    return lambda done, name: progress(before + done, total, name)


def _notes(parts: Sequence[Part]) -> tuple[str, ...]:
    """What was found of earlier runs."""
    notes = [f"{part.name} was of another source or other options, or no part at all: it was replaced" for part in parts if part.replaced]
    found = sum(part.trusted for part in parts)
    return (*notes, f"continued after {human_bytes(found)} of an interrupted run") if found else tuple(notes)


def _keep(parts: Sequence[Part]) -> str:
    """Removes what the next run could not use, and says what stays."""
    kept = [part for part in parts if part.trusted]
    for part in parts:
        if part not in kept:
            part.remove()
    if not kept:
        return "nothing was left behind"
    names = f"{kept[0].name}" + (f" and {len(kept) - 1} more" if len(kept) > 1 else "")
    return f"{human_bytes(sum(part.trusted for part in kept))} stay in {names}: the same command continues there"


def _synced(parts: Sequence[Part]) -> str:
    """As `_keep`, with everything that is whole put on disk first."""
    try:
        for part in parts:
            part.sync()
    except OSError as error:  # a disk that is full may refuse that too
        return f"the last tensors could not be synced ({error.strerror}); {_keep(parts)}"
    return _keep(parts)


def _output(path: Path, metadata: Metadata, jobs: Sequence[TensorJob]) -> OutputFile:
    start, _ = header(metadata, jobs)
    return OutputFile(path, start, tuple(jobs), len(start) + sum(_padded(job.nbytes, DEFAULT_ALIGNMENT) for job in jobs))


def _groups(metadata: Metadata, jobs: Sequence[TensorJob], max_bytes: int) -> list[list[TensorJob]]:
    """The tensors of each shard, in order, as many as fit."""
    own = shard_metadata(1, 1, len(jobs))
    groups: list[list[TensorJob]] = [[]]
    head, data = len(_fields({**metadata, **own}, 0)), 0
    for job in jobs:
        entry, n_bytes = len(_entry(job, 0)), _padded(job.nbytes, DEFAULT_ALIGNMENT)
        if groups[-1] and _padded(head + entry, DEFAULT_ALIGNMENT) + data + n_bytes > max_bytes:
            groups.append([])
            head, data = len(_fields(own, 0)), 0
        groups[-1].append(job)
        head, data = head + entry, data + n_bytes
    return groups


def refuse_same_file(outputs: Iterable[Path], sources: Iterable[Path]) -> None:
    """Raises UsageError when one of `outputs` is one of `sources`, also through links."""
    standing = [path for path in outputs if path.exists()]
    for source in sources:
        for output in standing:
            if source.exists() and os.path.samefile(output, source):
                raise UsageError(f"the output {output} is the input {source}", "choose another name with -o")


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _fields(metadata: Metadata, n_tensors: int) -> bytes:
    """The start of a header: everything before the tensor table."""
    parts = [MAGIC, struct.pack("<IQQ", 3, n_tensors, len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), *_value(value)]
    return b"".join(parts)


def _entry(job: TensorJob, offset: int) -> bytes:
    """A tensor's row of the table."""
    return _text(job.name) + struct.pack(f"<I{len(job.shape)}QIQ", len(job.shape), *reversed(job.shape), job.type.number, offset)


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
