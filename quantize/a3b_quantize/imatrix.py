"""Importance matrices as files: llama.cpp's imatrix.gguf in both directions, and the older `.dat` that many repositories still have.

An entry belongs to one weight and holds, for each of its matrices (one, or one for each expert), the sum of x^2 of every input channel
and how many tokens were summed. Source: tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp of llama.cpp.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import MAGIC, GGUFFile, TensorInfo, read_gguf
from a3b_gguf.gguf_write import file_size, header
from a3b_gguf.metadata import Metadata, array, string, u32
from a3b_gguf.part import part_file
from a3b_gguf.tensors import TYPES, TensorJob

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
I32 = struct.Struct("<i")
LONGEST_NAME = 1 << 12  # bytes; what is longer is no name, and the file no .dat
AGAIN = "download it or calibrate again"


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """sums: float32 [n_mat, n_cols], x^2 of each input channel summed over tokens; counts: float32 [n_mat], the tokens of each matrix.

    In an entry of a `.dat` the matrices are not told apart: n_mat is 1, sums are mean * count, and count is in chunks.
    """

    sums: NDArray[np.float32] = field(repr=False)
    counts: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Imatrix:
    """entries: by the name of the weight. chunk_size: tokens of a chunk; is_legacy: of a `.dat`, where tokens by expert are unknown."""

    entries: Mapping[str, ImatrixEntry] = field(repr=False)
    chunk_size: int
    chunk_count: int
    datasets: tuple[str, ...]
    is_legacy: bool = False


def read_imatrix(path: Path) -> Imatrix:
    """An imatrix.gguf or a `.dat`, told apart by their first bytes.

    Raises BadInput for a file that is neither or is cut off, and for an entry that is not whole or holds NaN, infinite or negative
    numbers, by its name.
    """
    try:
        with path.open("rb") as data:
            start = data.read(len(MAGIC))
            imatrix = _read_new(path) if start == MAGIC else _Legacy(path, start + data.read()).read()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "give an imatrix.gguf or an imatrix.dat") from error
    for name, entry in imatrix.entries.items():
        _check(path, name, entry)
    return imatrix


def write_imatrix(path: Path, imatrix: Imatrix) -> int:
    """Writes an imatrix.gguf as llama.cpp's own tool does, entries sorted by name; returns its bytes. Only whole files appear."""
    metadata: Metadata = {
        "general.type": string("imatrix"),
        DATASETS: array("str", imatrix.datasets),
        CHUNK_COUNT: u32(imatrix.chunk_count),
        CHUNK_SIZE: u32(imatrix.chunk_size),
    }
    jobs = [job for name in sorted(imatrix.entries) for job in _jobs(name, imatrix.entries[name])]
    start, _ = header(metadata, jobs)
    n_bytes = file_size(metadata, jobs)
    with part_file(path, n_bytes) as out:
        out.write(start)
        for job in jobs:
            for chunk in job.chunks():
                out.write(chunk)
            out.write(bytes(-out.tell() % 32))
    return n_bytes


def _jobs(name: str, entry: ImatrixEntry) -> Iterator[TensorJob]:
    """counts is [1, n_mat] in ggml's order: one column a matrix."""
    for suffix, values in ((SUMS, entry.sums), (COUNTS, entry.counts.reshape(-1, 1))):
        data = np.ascontiguousarray(values, np.float32)
        yield TensorJob(name + suffix, data.shape, TYPES["f32"], partial(_chunks, data))


def _chunks(data: NDArray[np.float32]) -> Iterator[bytes]:
    yield data.tobytes()


def _read_new(path: Path) -> Imatrix:
    file = read_gguf(path, arrays=True)
    tensors = {info.name: info for info in file.tensors}
    names = dict.fromkeys(name.removesuffix(suffix) for suffix in (SUMS, COUNTS) for name in tensors if name.endswith(suffix))
    if not names:
        what = "a model" if "general.architecture" in file.metadata else "something else"
        raise BadInput(f"{path} is {what}, not an importance matrix: no tensor ends in {SUMS}", "give an imatrix.gguf or an imatrix.dat")
    entries = {name: _entry(file, name, tensors) for name in names}
    datasets = tuple(str(value) for value in file.get(DATASETS, ()))
    return Imatrix(entries, int(file.get(CHUNK_SIZE, 0)), int(file.get(CHUNK_COUNT, 0)), datasets)


def _entry(file: GGUFFile, name: str, tensors: Mapping[str, TensorInfo]) -> ImatrixEntry:
    for suffix in (SUMS, COUNTS):
        if name + suffix not in tensors:
            raise BadInput(f"{file.path}: entry {name} has no {suffix}", AGAIN)
        if tensors[name + suffix].type.name != "f32":
            raise BadInput(f"{file.path}: {name}{suffix} is {tensors[name + suffix].type.name}, expected f32", AGAIN)
    sums, counts = (_values(file.path, tensors[name + suffix]) for suffix in (SUMS, COUNTS))
    if sums.size % counts.size:
        raise BadInput(f"{file.path}: entry {name} has {sums.size} sums for {counts.size} matrices, which does not divide", AGAIN)
    return ImatrixEntry(sums.reshape(counts.size, -1), counts)


def _values(path: Path, info: TensorInfo) -> NDArray[np.float32]:
    return np.fromfile(path, np.float32, math.prod(info.shape), offset=info.offset)


class _Legacy:
    """A cursor over a `.dat`: i32 entries; each i32 length, name, i32 calls, i32 values, float32 values; then i32 chunks, dataset."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> Imatrix:
        count = self.number("the number of entries")
        if not 0 < count <= len(self.data) // 16:
            raise BadInput(f"{self.path} is neither an imatrix.gguf nor an imatrix.dat", "give one of these")
        entries: dict[str, ImatrixEntry] = {}
        for index in range(count):
            name = self.text(f"entry {index + 1} of {count}")
            if name in entries:
                raise BadInput(f"{self.path}: entry {name} occurs twice", AGAIN)
            entries[name] = self.entry(name)
        chunks = self.number("the number of chunks") if self.at < len(self.data) else 0
        dataset = self.text("the data set") if self.at < len(self.data) else ""
        return Imatrix(entries, 0, max(chunks, 0), (dataset,) if dataset else (), is_legacy=True)

    def entry(self, name: str) -> ImatrixEntry:
        calls, n_values = self.number(name), self.number(name)
        if calls < 0 or n_values < 1:
            raise BadInput(f"{self.path}: entry {name} has {n_values} values of {calls} calls", AGAIN)
        sums = np.frombuffer(self.take(4 * n_values, name), np.float32).reshape(1, -1)
        return ImatrixEntry(sums, np.array([max(calls, 1)], np.float32))  # llama-quantize does not divide by 0 calls either

    def number(self, what: str) -> int:
        return int(I32.unpack(self.take(4, what))[0])

    def text(self, what: str) -> str:
        length = self.number(what)
        if not 0 <= length <= LONGEST_NAME:
            raise BadInput(f"{self.path}: {what} has a name of {length} bytes: no imatrix.dat, or a damaged one", AGAIN)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{self.path}: {what} has a name that is not UTF-8: no imatrix.dat, or a damaged one", AGAIN) from error

    def take(self, n_bytes: int, what: str) -> bytes:
        start, self.at = self.at, self.at + n_bytes
        if self.at > len(self.data):
            ends = f"{what} at byte {start:,} needs {n_bytes:,} bytes, the file ends at {len(self.data):,}"
            raise BadInput(f"{self.path} is cut off: {ends}", AGAIN)
        return self.data[start : self.at]


def _check(path: Path, name: str, entry: ImatrixEntry) -> None:
    """Raises BadInput for numbers that no sum of squares and no count can be."""
    for what, values in (("count", entry.counts.reshape(-1, 1)), ("sum", entry.sums)):
        good = np.isfinite(values) & (values >= 0)
        if not good.all():
            matrix, column = np.argwhere(~good)[0]
            where = f", matrix {matrix}" + (f", column {column}" if what == "sum" else "")
            hint = "it must be finite and at least 0: the calibration went wrong or the file is damaged"
            raise BadInput(f"{path}: entry {name}{where}: the {what} is {values[matrix, column]}", hint)
