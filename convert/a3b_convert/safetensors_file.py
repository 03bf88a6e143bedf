"""One safetensors file: its header parsed and checked, its tensors read by position a few rows at a time.

Format: https://huggingface.co/docs/safetensors - an 8-byte little-endian length, a JSON header, then the bytes of all tensors without
holes or overlaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from a3b_convert.floats import first_nonfinite
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import OpenFile
from a3b_gguf.tensors import TYPES, GGMLType

MAX_HEADER = 100_000_000  # the format's own limit
AGAIN = "download the file again"
# name in the header -> bits of an element. Source: enum Dtype in safetensors/src/tensor.rs
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
FLOATS = {"BF16": TYPES["bf16"], "F16": TYPES["f16"], "F32": TYPES["f32"]}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor as it lies in its file. shape is row-major, columns last; offset is from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: OpenFile
    offset: int

    @property
    def type(self) -> GGMLType:
        """Its type in ggml's words. Raises BadInput for a dtype that cannot be converted."""
        if self.dtype not in FLOATS:
            raise BadInput(
                f"{self.file.path}: tensor {self.name} has dtype {self.dtype}, expected one of {', '.join(FLOATS)}",
                "convert the model's bf16 checkpoint: quantized and integer weights are not converted",
            )
        return FLOATS[self.dtype]

    def unrounded(self) -> SafeTensor:
        """The same tensor with the values that it has before they are rounded to `type`, for who wants them in f32."""
        return self

    def read(self, start: int, stop: int) -> bytes:
        """Rows start..stop, counted over all leading dimensions, as they are stored.

        Raises BadInput that names the row, and the expert of a packed tensor, when a value is NaN or infinite.
        """
        kind = self.type
        width = kind.row_bytes(self.shape[-1])
        data = self.file.read(self.offset + start * width, (stop - start) * width)
        bad = first_nonfinite(data, kind)
        if bad is not None:
            row, column = divmod(bad, self.shape[-1])
            raise BadInput(
                f"{self.file.path}: tensor {self.name}{place(self.shape, start + row)}, column {column} is NaN or infinite",
                "the checkpoint is damaged or diverged in training; a quantizer would turn the whole block into zeros",
            )
        return data


def place(shape: Sequence[int], row: int) -> str:
    """A row in words; of a packed expert tensor with the expert."""
    if len(shape) == 3:
        return f", expert {row // shape[1]}, row {row % shape[1]}"
    return f", row {row}" if len(shape) > 1 else ""


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Every tensor of the file, none of its data. Raises BadInput that says which promise of the format is broken."""
    try:
        file = OpenFile(path)
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", AGAIN) from error
    if size < 8:
        raise BadInput(f"{path}: {size} bytes are too few for a safetensors file", AGAIN)
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER:
        raise BadInput(f"{path} is no safetensors file: its header would have {length:,} bytes, at most {MAX_HEADER:,} are allowed", AGAIN)
    if 8 + length > size:
        raise BadInput(f"{path} is cut off: its header needs {8 + length:,} bytes, the file has {size:,}", AGAIN)
    header = _header(path, file.read(8, length))
    tensors = {name: _tensor(path, name, entry, file, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    _check_ranges(path, header, size - 8 - length)
    return tensors


def _header(path: Path, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{path}: {twice} occurs twice in the header", AGAIN)
        return found

    try:
        header = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of more digits than Python reads
        raise BadInput(f"{path}: the header is not JSON ({error})", AGAIN) from error
    if not isinstance(header, dict):
        raise BadInput(f"{path}: the header is not an object", AGAIN)
    return header


def _tensor(path: Path, name: str, entry: Any, file: OpenFile, data_start: int) -> SafeTensor:
    """One entry of the header, its values checked one by one."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadInput(f"{path}: tensor {name} lacks dtype, shape or data_offsets", AGAIN)
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadInput(f"{path}: tensor {name} has the unknown dtype {dtype!r}", f"known: {', '.join(DTYPE_BITS)}")
    if not _whole(shape) or not _whole(span) or len(span) != 2:
        raise BadInput(f"{path}: tensor {name} has shape {shape!r} and data_offsets {span!r}, expected whole numbers", AGAIN)
    begin, end = span
    n_bits = prod(shape) * DTYPE_BITS[dtype]
    if begin > end or n_bits != 8 * (end - begin):
        raise BadInput(
            f"{path}: tensor {name} of shape {shape} in {dtype} needs {-(-n_bits // 8):,} bytes, data_offsets {span} give {end - begin:,}",
            AGAIN,
        )
    return SafeTensor(name, dtype, tuple(shape), file, data_start + begin)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 62 for v in values)


def _check_ranges(path: Path, header: dict[str, Any], n_bytes: int) -> None:
    """The tensors' byte ranges must cover the rest of the file, without holes and overlaps."""
    spans = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    at = 0
    for begin, end, name in spans:
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise BadInput(f"{path}: tensor {name} starts at byte {begin:,} of the data, expected {at:,}: it {what}", AGAIN)
        at = end
    if at > n_bytes:
        raise BadInput(f"{path} is cut off: its tensors need {at:,} bytes after the header, the file has {n_bytes:,}", AGAIN)
    if at < n_bytes:
        raise BadInput(f"{path} has {n_bytes - at:,} bytes more than its tensors need", AGAIN)
