"""What a tensor is before it is written: its type, where its rows come from, how its bytes are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Metadata

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GGMLType:
    """An element type of ggml. block: weights in a block; block_bytes: bytes of one block."""

    name: str
    number: int
    block: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block

    @property
    def is_float(self) -> bool:
        return self.name in ("f32", "f16", "bf16", "f64")

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of `n_cols` weights. Raises BadInput when the row is not a whole number of blocks."""
        if n_cols % self.block:
            raise BadInput(f"a row of {n_cols} weights is not a whole number of {self.name} blocks of {self.block}")
        return n_cols // self.block * self.block_bytes

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return self.row_bytes(shape[-1]) * prod(shape[:-1])


# Source: enum ggml_type in ggml.h and GGML_QUANT_SIZES in gguf-py; a test compares this table with both.
TYPES: dict[str, GGMLType] = {
    name: GGMLType(name, number, block, block_bytes)
    for name, number, block, block_bytes in (
        ("f32", 0, 1, 4), ("f16", 1, 1, 2), ("q4_0", 2, 32, 18), ("q4_1", 3, 32, 20), ("q5_0", 6, 32, 22), ("q5_1", 7, 32, 24),
        ("q8_0", 8, 32, 34), ("q8_1", 9, 32, 36), ("q2_k", 10, 256, 84), ("q3_k", 11, 256, 110), ("q4_k", 12, 256, 144),
        ("q5_k", 13, 256, 176), ("q6_k", 14, 256, 210), ("q8_k", 15, 256, 292), ("iq2_xxs", 16, 256, 66), ("iq2_xs", 17, 256, 74),
        ("iq3_xxs", 18, 256, 98), ("iq1_s", 19, 256, 50), ("iq4_nl", 20, 32, 18), ("iq3_s", 21, 256, 110), ("iq2_s", 22, 256, 82),
        ("iq4_xs", 23, 256, 136), ("i8", 24, 1, 1), ("i16", 25, 1, 2), ("i32", 26, 1, 4), ("i64", 27, 1, 8), ("f64", 28, 1, 8),
        ("iq1_m", 29, 256, 56), ("bf16", 30, 1, 2), ("tq1_0", 34, 256, 54), ("tq2_0", 35, 256, 66), ("mxfp4", 39, 32, 17),
        ("nvfp4", 40, 64, 36), ("q1_0", 41, 128, 18), ("q2_0", 42, 64, 18),
    )
}  # fmt: skip
TYPE_OF_NUMBER = {kind.number: kind for kind in TYPES.values()}


class TensorSource(Protocol):
    """A tensor that can be read row by row: of a checkpoint after its transforms, or of a GGUF file.

    shape is row-major, columns last: GGUF's `ne` reversed. Rows are counted over all leading dimensions.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> GGMLType: ...
    def rows(self, start: int, stop: int) -> NDArray[float32]:
        """Rows start..stop as float32 [stop - start, columns], a fresh or read-only array."""
        ...

    def raw(self, start: int, stop: int) -> bytes | memoryview:
        """The same rows as they are stored, in `type`."""
        ...


def n_rows(shape: tuple[int, ...]) -> int:
    """Rows of a tensor, counted over all leading dimensions; a vector is one row."""
    return prod(shape[:-1])


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model before it is written: what convert yields, what quantize takes. notes: what the user should know."""

    metadata: Metadata
    tensors: tuple[TensorSource, ...]
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"].value)


@dataclass(frozen=True, slots=True)
class TensorJob:
    """A tensor to be written. chunks() yields its bytes in order; their sum is `nbytes`, known beforehand."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    chunks: Callable[[], Iterator[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(self.shape)
