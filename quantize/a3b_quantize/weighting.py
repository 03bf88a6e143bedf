"""Importance of a tensor's columns, matrix by matrix: checked once, then handed to kernels one row of numbers at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.tensors import GGMLType

# Tensor name -> float32 [n_mat, n_cols]: how much an error in each column counts. n_mat: 1 for a matrix, for experts their number.
Importance = Mapping[str, NDArray[np.float32]]


def check_importance(name: str, shape: tuple[int, ...], importance: NDArray[np.float32]) -> None:
    """Raises BadInput for importance that does not fit a tensor of this shape, or that is NaN, infinite or negative, with its place."""
    n_mat, n_cols = prod(shape[:-2]), shape[-1]
    if importance.shape != (n_mat, n_cols):
        raise BadInput(
            f"importance of {name} has shape {list(importance.shape)}, expected {[n_mat, n_cols]}", "it was calibrated on another model"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        total = importance.sum()  # one pass without a temporary; not finite when a value is not
    if np.isfinite(total) and importance.min(initial=0) >= 0:
        return
    bad = np.argwhere(~(np.isfinite(importance) & (importance >= 0)))
    if len(bad):  # and not just a sum that overflows
        mat, column = (int(i) for i in bad[0])
        where = f"expert {mat} of {n_mat}, column {column}" if len(shape) > 2 else f"column {column}"
        raise BadInput(
            f"importance of {name}, {where} is {importance[mat, column]}",
            "it must be finite and at least 0: the importance matrix is damaged",
        )


def by_matrix(
    shape: tuple[int, ...], start: int, stop: int, importance: NDArray[np.float32] | None
) -> Iterator[tuple[slice, NDArray[np.float32] | None]]:
    """The rows start..stop of a tensor cut at the borders of its matrices: which of them, counted from `start`, and their importance.

    Importance of zeros only says nothing about a matrix: None, as if it had none.
    """
    if importance is None:
        yield slice(0, stop - start), None
        return
    height = shape[-2] if len(shape) > 1 else 1
    for mat in range(start // height, (stop - 1) // height + 1):
        row = importance[mat]
        yield slice(max(mat * height - start, 0), min((mat + 1) * height, stop) - start), (row if row.any() else None)


# Types of ggml that search over 16 weights; the others over 32.
SIXTEENS = ("q2_k", "q3_k", "q6_k", "iq2_xs", "iq2_s", "nvfp4")


def revived(kind: GGMLType, importance: NDArray[np.float32]) -> NDArray[np.float32]:
    """Importance [n_cols] for ggml's kernels, which write zeros for a block whose importance is all zero: it gets the least of the row.

    Everything else stays as it is, so that the bytes are llama-quantize's.
    """
    blocks = importance.reshape(-1, 16 if kind.name in SIXTEENS or len(importance) % 32 else 32)
    alive = blocks.any(axis=1, keepdims=True)
    if alive.all():
        return importance
    least = importance.min(where=importance > 0, initial=importance.max())
    return np.where(alive, blocks, least).astype(np.float32).reshape(-1)
