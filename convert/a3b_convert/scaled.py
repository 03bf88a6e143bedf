"""FP8 weights with a scale for each tensor, row or block: read as the products, a few rows at a time.

Source: dequant_simple in llama.cpp conversion/base.py, with whose output a test compares: code x scale in float32, the scales of a
partial last block cropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_convert.floats import E4M3, E4M3_NAN, first_nonfinite, to_bf16
from a3b_convert.prequantized import BF16_CHECKPOINT, Scheme
from a3b_convert.safetensors_file import FLOATS, SafeTensor, place
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import to_float32
from a3b_gguf.tensors import TYPES, GGMLType

F8 = "F8_E4M3"
SCALES = ("_scale_inv", "_scale")  # what a scale's name has behind its weight's; both are multiplied
# ends of names of scales that belong to activations: computing with other types needs none of them
ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".activation_scale", "_activation_scale")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which scale a weight has: rows are counted over all leading dimensions, and the blocks begin anew every `period` rows."""

    period: int
    rows: int
    cols: int

    def scale_row(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of scales for each row of weights."""
        return row // self.period * -(-self.period // self.rows) + row % self.period // self.rows


@dataclass(frozen=True, slots=True)
class ScaledTensor(SafeTensor):
    """A tensor of FP8 codes that is read as numbers of type `kind`, f32 or bf16. scale: reshaped to one row for each row of blocks."""

    scale: SafeTensor
    blocks: Blocks
    kind: GGMLType

    @property
    def type(self) -> GGMLType:
        return self.kind

    def unrounded(self) -> SafeTensor:
        return replace(self, kind=TYPES["f32"])

    def read(self, start: int, stop: int) -> bytes:
        """Rows start..stop as `kind`, rounded to nearest even. Raises BadInput for a NaN code or scale, and for a product beyond `kind`."""
        n_cols = self.shape[-1]
        codes = np.frombuffer(self.file.read(self.offset + start * n_cols, (stop - start) * n_cols), np.uint8)
        if codes.view(np.int8).max() == E4M3_NAN or codes.max() == E4M3_NAN | 0x80:  # the largest code of each sign
            raise self._wrong(int(np.argmax((codes & E4M3_NAN) == E4M3_NAN)), start, "is NaN", "the checkpoint is damaged")
        rows = E4M3.take(codes, mode="clip").reshape(-1, n_cols)  # "clip" spares take a check of each index
        with np.errstate(over="ignore"):
            rows *= self._scales(start, stop)
        data = (rows if self.kind.name == "f32" else to_bf16(rows)).tobytes()
        bad = first_nonfinite(data, self.kind)
        if bad is not None:
            raise self._wrong(bad, start, f"times its scale in {self.scale.name} is too large for {self.kind.name}", "the scale is damaged")
        return data

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """The scale of each weight [stop - start, columns], or [stop - start, 1] when a row has one."""
        numbers = self.blocks.scale_row(np.arange(start, stop))
        first, last = int(numbers[0]), int(numbers[-1])
        scales = to_float32(self.scale.read(first, last + 1), self.scale.type).reshape(last + 1 - first, -1)
        if scales.shape[1] > 1:
            scales = np.repeat(scales, self.blocks.cols, axis=1)[:, : self.shape[-1]]
        return scales[numbers - first]

    def _wrong(self, index: int, start: int, what: str, hint: str) -> BadInput:
        row, column = divmod(index, self.shape[-1])
        where = f"tensor {self.name}{place(self.shape, start + row)}, column {column}"
        return BadInput(f"{self.file.path}: {where} {what}", f"{hint}; {BF16_CHECKPOINT}")


def with_scales(folder: Path, tensors: Mapping[str, SafeTensor], scheme: Scheme, kind: GGMLType) -> tuple[dict[str, SafeTensor], list[str]]:
    """The tensors, FP8 ones joined with their scales and read as `kind`, scales left out; and what the user should know.

    Raises BadInput that names both tensors when a weight or a scale lacks the other, or the scale's shape does not belong to the
    weight's and to the scheme's blocks.
    """
    ignored = {name for name in tensors if name.endswith(ACTIVATIONS)}
    scales = {name.removesuffix(end): name for end in SCALES for name in tensors if name.endswith(end) and name not in ignored}
    left_out = ignored | set(scales.values())
    out: dict[str, SafeTensor] = {}
    for name, tensor in tensors.items():
        if name in scales:
            out[name] = _scaled(tensor, tensors[scales[name]], scheme, kind)
        elif tensor.dtype == F8:
            names = " or ".join(name + end for end in SCALES)
            raise BadInput(f"{tensor.file.path}: tensor {name} is FP8, and its scale {names} is missing", BF16_CHECKPOINT)
        elif name not in left_out:
            out[name] = tensor
    alone = {name: scale for name, scale in scales.items() if name not in tensors}
    if alone:
        name, scale = next(iter(alone.items()))
        raise BadInput(f"{folder}: tensor {scale} is the scale of {name}, which is missing", "the checkpoint is incomplete")
    return out, _notes(len(scales), ignored, scheme, kind)


def _scaled(weight: SafeTensor, scale: SafeTensor, scheme: Scheme, kind: GGMLType) -> ScaledTensor:
    if weight.dtype != F8:
        raise BadInput(
            f"{weight.file.path}: tensor {weight.name} has dtype {weight.dtype} and a scale, {scale.name}; expected {F8}", BF16_CHECKPOINT
        )
    if scale.dtype not in FLOATS:
        where = f"{scale.file.path}: tensor {scale.name}, the scale of {weight.name},"
        raise BadInput(f"{where} has dtype {scale.dtype}, expected one of {', '.join(FLOATS)}", BF16_CHECKPOINT)
    wanted = _known(weight.shape, scheme.block) if weight.shape and all(weight.shape) else {}
    blocks = wanted.get(scale.shape)
    if blocks is None:
        shapes = " or ".join(str(list(shape)) for shape in wanted)
        raise BadInput(
            f"{scale.file.path}: tensor {scale.name} has shape {list(scale.shape)}; for {weight.name} of {list(weight.shape)}"
            f"{f' in blocks of {list(scheme.block)}' if scheme.block else ''} it must be {shapes or 'absent'}",
            "config.json's quantization_config and the tensors do not belong together",
        )
    n_cols = -(-weight.shape[-1] // blocks.cols)
    if scale.shape[-1:] != (n_cols,) or len(scale.shape) < 2:
        scale = replace(scale, shape=(prod(scale.shape) // n_cols, n_cols))
    own = {field.name: getattr(weight, field.name) for field in fields(SafeTensor)}
    return ScaledTensor(**own, scale=scale, blocks=blocks, kind=kind)


def _known(shape: tuple[int, ...], block: tuple[int, int] | None) -> dict[tuple[int, ...], Blocks]:
    """Shape of the scale -> how it belongs to a weight of `shape`: blocks where the scheme has them, else rows or the whole tensor."""
    *experts, n_rows, n_cols = (1, *shape) if len(shape) == 1 else shape
    if block:
        return {(*experts, -(-n_rows // block[0]), -(-n_cols // block[1])): Blocks(n_rows, *block)}
    whole, matrix, row = (Blocks(n, n, n_cols) for n in (prod(shape[:-1]), n_rows, 1))
    each = {(*experts,): matrix, (*experts, 1): matrix, (*experts, 1, 1): matrix} if experts else {}
    return {(): whole, (1,): whole, (1, 1): whole} | each | {(*experts, n_rows): row, (*experts, n_rows, 1): row}


def _notes(n_scaled: int, ignored: set[str], scheme: Scheme, kind: GGMLType) -> list[str]:
    if n_scaled:
        rounding = ", rounded to bf16; --type f32 keeps the products" if kind.name == "bf16" else ""
        notes = [f"{scheme.name}: {n_scaled} tensors are multiplied with their scales{rounding}"]
    else:
        notes = [f"config.json says {scheme.name}, but no tensor has a scale: all are taken as they are"]
    kinds = {end for end in ACTIVATIONS if any(name.endswith(end) for name in ignored)}
    return notes + ([f"left out: {len(ignored)} scales of activations ({', '.join(sorted(kinds))})"] if ignored else [])
