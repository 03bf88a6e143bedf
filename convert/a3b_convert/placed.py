"""A checkpoint tensor after its transforms, as a TensorSource: reads only the rows it is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from a3b_convert.layout import Placement, Turned
from a3b_convert.safetensors_file import SafeTensor
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import to_float32
from a3b_gguf.tensors import TYPES, GGMLType

# float32 rows in, float32 rows of the same shape out
Value = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Matrix = tuple[int, NDArray[np.generic]]  # an expert and its numbers
NO_MATRIX: Matrix = (-1, np.empty((0, 0)))


class PlacedTensor:
    """Gathers rows of its parts in the target's order, then changes their values. Threads may share it.

    always_f32: llama.cpp wants this tensor in F32 whatever the file's type is.
    """

    def __init__(self, name: str, parts: Sequence[SafeTensor], placement: Placement, value: Value | None, always_f32: bool) -> None:
        self._name, self._placement, self._value = name, placement, value
        self._parts = tuple(part.unrounded() if always_f32 else part for part in parts)
        self._ends = list(accumulate(run.count for run in placement.runs))
        self.always_f32 = always_f32
        self._last = NO_MATRIX  # one pair, so that threads see no half of it

    @property
    def name(self) -> str:
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._placement.shape

    @property
    def source_type(self) -> GGMLType:
        """The type that its sources are read as."""
        return self._parts[0].type

    @property
    def source_dtype(self) -> str:
        """Its sources' dtype in the checkpoint, in lower case: bf16, f8_e4m3."""
        return self._parts[0].dtype.lower()

    @property
    def type(self) -> GGMLType:
        """The type that loses nothing: the checkpoint's own, or F32 where llama.cpp wants it."""
        return TYPES["f32"] if self.always_f32 else self.source_type

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop as float32 [stop - start, columns]. Raises BadInput for a NaN or infinity, of the source or of a transform."""
        rows = to_float32(self._gather(start, stop), self.source_type).reshape(stop - start, self.shape[-1])
        if self._value is None:
            return rows
        with np.errstate(over="ignore"):
            rows = self._value(rows)
        if not np.isfinite(rows).all():
            source = self._parts[0]
            raise BadInput(
                f"{source.file.path}: tensor {source.name} overflows on its way to {self.name}",
                "the checkpoint is damaged, or its values were transformed already",
            )
        return rows

    def raw(self, start: int, stop: int) -> bytes | memoryview:
        """The same rows in `type`; the checkpoint's own bytes, only moved, where type and values stay."""
        if self._value is None and self.type == self.source_type:
            return self._gather(start, stop)
        return self.rows(start, stop).data.cast("B")

    def _gather(self, start: int, stop: int) -> bytes | memoryview:
        """Rows start..stop of the target in the sources' type."""
        if self._placement.turned is not None:
            return self._turned(self._placement.turned, start, stop)
        pieces = []
        at, index = start, bisect_right(self._ends, start)
        while at < stop:
            run = self._placement.runs[index]
            offset = at - (self._ends[index] - run.count)
            n_rows = min(run.count - offset, stop - at)
            pieces.append(self._parts[run.part].read(run.row + offset, run.row + offset + n_rows))
            at, index = at + n_rows, index + 1
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._placement.columns is None:
            return data
        words = np.frombuffer(data, f"u{self.source_type.block_bytes}").reshape(stop - start, self.shape[-1])
        return self._placement.columns.apply(words).data.cast("B")

    def _turned(self, turned: Turned, start: int, stop: int) -> bytes:
        """Rows start..stop of transposed experts. An expert is kept until its last row was asked for: calls take a part of it."""
        pieces = []
        while start < stop:
            expert, row = divmod(start, turned.count)
            n_rows = min(turned.count - row, stop - start)
            number, matrix = self._last
            if number != expert:
                data = self._parts[0].read(expert * turned.n_rows, (expert + 1) * turned.n_rows)
                matrix = np.frombuffer(data, f"u{self.source_type.block_bytes}").reshape(turned.n_rows, turned.n_cols)
            self._last = (expert, matrix) if row + n_rows < turned.count else NO_MATRIX
            first = turned.first + row
            pieces.append(matrix[:, first : first + n_rows].T.tobytes())
            start += n_rows
        return b"".join(pieces)
