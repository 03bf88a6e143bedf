"""Sources that are quantized already: refused, or decoded by ggml when the user asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.ggml import dequantize
from a3b_gguf.tensors import GGMLType, Model, TensorSource
from a3b_quantize.assign import Assignment

INTEGERS = ("i8", "i16", "i32", "i64")  # tables of ids, not weights: they are copied


class Decoded:
    """A quantized TensorSource whose rows ggml decodes, several times faster than the reference in gguf-py."""

    def __init__(self, tensor: TensorSource) -> None:
        self._tensor = tensor

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    @property
    def type(self) -> GGMLType:
        return self._tensor.type

    def raw(self, start: int, stop: int) -> bytes | memoryview:
        return self._tensor.raw(start, stop)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return dequantize(self.type, self.raw(start, stop)).reshape(stop - start, self.shape[-1])


def decoded(model: Model) -> Model:
    """`model` with every quantized tensor as a Decoded."""
    return replace(model, tensors=tuple(Decoded(each) if is_quantized(each.type) else each for each in model.tensors))


def is_quantized(kind: GGMLType) -> bool:
    """Whether weights of this type lost something already."""
    return not kind.is_float and kind.name not in INTEGERS


def refuse_quantized(model: Model, allowed: bool = False) -> tuple[str, ...]:
    """Raises BadInput naming the first tensor that is quantized already, unless that is `allowed`; then a note about them."""
    quantized = [tensor for tensor in model.tensors if is_quantized(tensor.type)]
    if not quantized:
        return ()
    first = quantized[0]
    if not allowed:
        raise BadInput(
            f"tensor {first.name} is {first.type.name}: the source is quantized already, expected f32, f16 or bf16",
            "what was lost cannot come back: quantize from the checkpoint folder or from a bf16 GGUF, or add --allow-requantize",
        )
    kinds = ", ".join(sorted({tensor.type.name for tensor in quantized}))
    return (f"{len(quantized)} tensors of the source are quantized already ({kinds}): the errors add up",)


def refuse_changed(model: Model, assignments: Sequence[Assignment], allowed: bool = False) -> tuple[str, ...]:
    """As `refuse_quantized`, of the tensors that change their type only: for copies."""
    changed = {each.name for each in assignments if each.type != each.source}
    return refuse_quantized(replace(model, tensors=tuple(each for each in model.tensors if each.name in changed)), allowed)
