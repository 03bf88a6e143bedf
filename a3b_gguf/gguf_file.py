"""A GGUF file's header and tensor table, read in a tenth of a second however large the vocabulary.

The reader walks the header with `struct` over a memory map and skips long arrays unless it is asked for them. It never
touches tensor bytes. Every count and length is checked against the bytes that are left before it is used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import KIND_OF_NUMBER, KINDS, Field, Metadata, SkippedArray
from a3b_gguf.tensors import TYPE_OF_NUMBER, GGMLType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
LONGEST_NAME, LONGEST_TEXT = 1 << 16, 1 << 28  # bytes; a damaged length must not make the reader decode gigabytes
INLINE_ELEMENTS = 1024  # longer arrays (tokens, scores, merges) are skipped unless asked for
# How files start that people hold for models.
SIGNS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file: git lfs pull",
    b"<": "a web page: the download failed, do it again",
    b"A3BPART1": "an unfinished file of a3b: run the command that wrote it again",
    b"PK\x03\x04": "an archive, as PyTorch's checkpoints are: a3b reads safetensors and GGUF",
}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. shape is row-major, columns last; offset is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Header and tensor table of a file, never its bytes."""

    path: Path
    version: int
    metadata: Metadata = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    alignment: int
    data_offset: int
    file_size: int

    @property
    def architecture(self) -> str:
        return str(self.need("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        found = self.metadata.get(key)
        return default if found is None else found.value

    def need(self, key: str) -> Any:
        """The value of `key`. Raises BadInput when the file lacks it."""
        if key not in self.metadata:
            raise BadInput(f"{self.path}: metadata key {key} is missing", "convert the model again from its checkpoint")
        return self.metadata[key].value

    def hparam(self, key: str, default: Any = None) -> Any:
        """The value of the architecture's own key: `hparam("block_count")` reads `qwen35moe.block_count`."""
        return self.get(f"{self.architecture}.{key}", default)

    def need_hparam(self, key: str) -> Any:
        return self.need(f"{self.architecture}.{key}")


def read_gguf(path: str | Path, arrays: bool = False) -> GGUFFile:
    """Header and tensor table of `path`; long arrays only with `arrays`, else a SkippedArray stands for each.

    Raises BadInput that names the byte, the key and what was expected when the file is not a whole GGUF.
    """
    path = Path(path)
    try:
        about = os.stat(path)
        _refuse_no_file(path, about.st_mode)
        handle = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    size = about.st_size
    with handle:
        if size < 24:
            raise BadInput(f"{path}: {size} bytes are too few for a GGUF header of 24", "download or write the file again")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Reader(path, view, size, arrays).read()


def read_array(file: GGUFFile, key: str) -> list[Any]:
    """All elements of an array of `file`, also of one that was skipped."""
    found = file.metadata.get(key)
    if found is None or found.kind != "arr":
        raise BadInput(f"{file.path}: metadata key {key} is missing or not an array")
    if not isinstance(found.value, SkippedArray):
        return list(found.value)
    with file.path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
        reader = _Reader(file.path, view, file.file_size, arrays=True)
        reader.at = found.value.offset
        return reader.elements(found.item, found.value.count, key)


def _refuse_no_file(path: Path, mode: int) -> None:
    """Raises BadInput for a folder, with what may have been meant, and for what has no size and no order: devices and pipes."""
    if stat.S_ISDIR(mode):
        inside = sorted(each.name for each in path.iterdir() if each.suffix == ".gguf")
        hint = f"name a file in it, like {path / inside[0]}" if inside else "name a .gguf file"
        if (path / "config.json").is_file():
            hint = f"a checkpoint becomes a GGUF file by: a3b convert {path}"
        raise BadInput(f"{path} is a folder, expected a .gguf file", hint)
    if not stat.S_ISREG(mode):
        raise BadInput(f"{path} is a device or a pipe, expected a .gguf file", "write it to a disk first: it is not read in order")


def _what_it_is(path: Path, start: bytes) -> str:
    """What to do with a file that starts like no GGUF."""
    if path.suffix == ".safetensors":
        return "weights of a checkpoint: give the folder to a3b convert or a3b quantize"
    return next((hint for sign, hint in SIGNS.items() if start.startswith(sign)), "give a .gguf file")


class _Reader:
    """A cursor over the header. Owns the invariant that nothing is read beyond the end of the file."""

    def __init__(self, path: Path, view: mmap.mmap, size: int, arrays: bool) -> None:
        self.path, self.view, self.size, self.arrays = path, view, size, arrays
        self.at = 0

    def cut_off(self, what: str, needed: int) -> BadInput:
        return BadInput(
            f"{self.path} is cut off: {what} at byte {self.at:,} needs {needed:,} bytes, the file ends at {self.size:,}",
            "download or write the file again",
        )

    def take(self, n_bytes: int, what: str) -> int:
        """Reserves the next bytes and returns where they start."""
        start = self.at
        if n_bytes > self.size - start:
            raise self.cut_off(what, n_bytes)
        self.at = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(U32.unpack_from(self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(U64.unpack_from(self.view, self.take(8, what))[0])

    def text(self, what: str, longest: int = LONGEST_TEXT) -> str:
        length = self.u64(what)
        if longest < length <= self.size - self.at:
            raise BadInput(f"{self.path}: {what} at byte {self.at:,} has {length:,} bytes, at most {longest:,} are sensible")
        start = self.take(length, what)
        try:
            return self.view[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{self.path}: {what} at byte {start:,} is not UTF-8") from error

    def read(self) -> GGUFFile:
        if self.view[:4] != MAGIC:
            message = f"{self.path} is not a GGUF file: it starts with {self.view[:4]!r}, expected {MAGIC!r}"
            raise BadInput(message, _what_it_is(self.path, self.view[:24]))
        self.at = 4
        version = self.u32("the version")
        if version not in VERSIONS:
            raise BadInput(f"{self.path}: GGUF version {version} is not known, expected 2 or 3 (little endian)")
        n_tensors, n_fields = self.u64("the tensor count"), self.u64("the metadata count")
        metadata = dict(self.fields(n_fields))
        alignment = self.alignment(metadata)
        table = [self.tensor(i) for i in range(self.bounded(n_tensors, 24, "the tensor table"))]
        data_offset = -(-self.at // alignment) * alignment
        tensors = tuple(TensorInfo(name, shape, kind, data_offset + offset) for name, shape, kind, offset in table)
        file = GGUFFile(self.path, version, metadata, tensors, alignment, data_offset, self.size)
        self.check_extents(file)
        return file

    def bounded(self, count: int, least_bytes: int, what: str) -> int:
        """`count`, refused when even the smallest elements would not fit into what is left of the file."""
        if count > (self.size - self.at) // least_bytes:
            raise self.cut_off(f"{what} of {count:,} entries", count * least_bytes)
        return count

    def fields(self, count: int) -> Iterator[tuple[str, Field]]:
        seen = set()
        for i in range(self.bounded(count, 13, "the metadata")):
            key = self.text(f"metadata key {i}", LONGEST_NAME)
            if key in seen:
                raise BadInput(f"{self.path}: metadata key {key} occurs twice")
            seen.add(key)
            kind = self.kind(key)
            if kind == "arr":
                item = self.kind(key)
                yield key, Field("arr", self.array(item, key), item)
            else:
                yield key, Field(kind, self.scalar(kind, key))

    def kind(self, key: str) -> str:
        number = self.u32(key)
        if number not in KIND_OF_NUMBER:
            raise BadInput(f"{self.path}: metadata key {key} has unknown value type {number}")
        return KIND_OF_NUMBER[number]

    def scalar(self, kind: str, key: str) -> Any:
        if kind == "str":
            return self.text(key)
        _, code, width = KINDS[kind]
        return struct.unpack_from("<" + code, self.view, self.take(width, key))[0]

    def array(self, item: str, key: str) -> Any:
        count = self.bounded(self.u64(key), max(KINDS[item][2], 8 if item == "str" else 1), key)
        if self.arrays or count <= INLINE_ELEMENTS:
            return self.elements(item, count, key)
        skipped = SkippedArray(count, self.at)
        self.skip(item, count, key)
        return skipped

    def elements(self, item: str, count: int, key: str) -> list[Any]:
        if item == "arr":
            raise BadInput(f"{self.path}: metadata key {key} is an array of arrays, which llama.cpp does not read")
        if item == "str":
            return [self.text(key) for _ in range(count)]
        _, code, width = KINDS[item]
        return list(struct.unpack_from(f"<{count}{code}", self.view, self.take(count * width, key)))

    def skip(self, item: str, count: int, key: str) -> None:
        if item == "arr":
            raise BadInput(f"{self.path}: metadata key {key} is an array of arrays, which llama.cpp does not read")
        if item != "str":
            self.take(count * KINDS[item][2], key)
            return
        # Half a million strings in a 248k vocabulary: the loop is kept to one unpack and one add.
        at, last, unpack, view = self.at, self.size - 8, U64.unpack_from, self.view
        for _ in range(count):
            if at > last:
                raise self.cut_off(key, at + 8 - self.at)
            at += 8 + unpack(view, at)[0]
        self.take(at - self.at, key)

    def alignment(self, metadata: Metadata) -> int:
        found = metadata.get("general.alignment")
        value = DEFAULT_ALIGNMENT if found is None else found.value
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise BadInput(f"{self.path}: general.alignment is {value!r}, expected a power of two")
        return value

    def tensor(self, index: int) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self.text(f"name of tensor {index}", LONGEST_NAME)
        n_dims = self.u32(f"dimensions of {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise BadInput(f"{self.path}: tensor {name} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(self.u64(f"shape of {name}") for _ in range(n_dims))[::-1]
        number = self.u32(f"type of {name}")
        if number not in TYPE_OF_NUMBER:
            raise BadInput(f"{self.path}: tensor {name} has unknown type {number}", "this a3b knows the types of llama.cpp of October 2026")
        offset = self.u64(f"offset of {name}")
        if min(shape) < 1 or shape[-1] % TYPE_OF_NUMBER[number].block:
            raise BadInput(f"{self.path}: tensor {name} has shape {list(shape)}, impossible for {TYPE_OF_NUMBER[number].name}")
        return name, shape, TYPE_OF_NUMBER[number], offset

    def check_extents(self, file: GGUFFile) -> None:
        names = set()
        for info in file.tensors:
            if info.name in names:
                raise BadInput(f"{self.path}: tensor {info.name} occurs twice")
            names.add(info.name)
            if info.offset % file.alignment:
                raise BadInput(f"{self.path}: tensor {info.name} starts at byte {info.offset:,}, not a multiple of {file.alignment}")
            if info.offset + info.nbytes > self.size:
                raise BadInput(
                    f"{self.path} is cut off: tensor {info.name} ends at byte {info.offset + info.nbytes:,}, the file at {self.size:,}",
                    "download or write the file again",
                )
