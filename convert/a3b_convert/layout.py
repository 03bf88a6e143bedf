"""Where a target tensor's numbers lie in its sources: nothing is computed here, rows and columns are only moved.

A layout takes the shape of one source and how many sources there are (one for each expert, else one) and answers with a Placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive rows of source number `part`, from `row` on."""

    part: int
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class Heads:
    """V heads that share a K head: the checkpoint groups them by K head, ggml's broadcast wants them tiled.

    Source order [k0v0, k0v1, k1v0, k1v1, ...], target order [k0v0, k1v0, ..., k0v1, k1v1, ...], so that K head number h % n_k
    belongs to V head h. Source: _reorder_v_heads in llama.cpp conversion/qwen.py; ggml-org/llama.cpp pull request 19468.
    """

    n_k: int
    per_k: int

    def order(self) -> list[int]:
        """Source head of each target head."""
        return [k * self.per_k + v for v in range(self.per_k) for k in range(self.n_k)]


@dataclass(frozen=True, slots=True)
class Columns:
    """A reordering of each row's heads of `size` columns."""

    heads: Heads
    size: int

    def apply(self, rows: NDArray[np.generic]) -> NDArray[np.generic]:
        """The rows [n, columns] with their heads in target order, as a new array."""
        grouped = rows.reshape(len(rows), self.heads.n_k, self.heads.per_k, self.size)
        return np.ascontiguousarray(grouped.swapaxes(1, 2)).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class Turned:
    """Each expert's matrix [n_rows, n_cols] is transposed; of its columns, `count` from `first` on become rows."""

    n_rows: int
    n_cols: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """shape: of the target. runs: its rows, in order. columns: how each row is reordered, if at all.

    turned: the experts are transposed; then `runs` is empty.
    """

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    columns: Columns | None = None
    turned: Turned | None = None


Layout = Callable[[tuple[int, ...], int], Placement]


def as_it_is(shape: tuple[int, ...], n_parts: int) -> Placement:
    return Placement(shape, (Run(0, 0, prod(shape[:-1])),))


def stack(shape: tuple[int, ...], n_parts: int) -> Placement:
    """One source for each expert, put behind one another: [F, H] x E -> [E, F, H]."""
    n_rows = prod(shape[:-1])
    return Placement((n_parts, *shape), tuple(Run(part, 0, n_rows) for part in range(n_parts)))


def half(number: int) -> Layout:
    """The first (0) or second (1) half of each expert's rows: gate or up of a packed [E, 2F, H]."""

    def layout(shape: tuple[int, ...], n_parts: int) -> Placement:
        n_experts, both, n_cols = shape
        n_rows = both // 2
        return Placement((n_experts, n_rows, n_cols), tuple(Run(0, e * both + number * n_rows, n_rows) for e in range(n_experts)))

    return layout


def turned(number: int, n_parts_of_columns: int) -> Layout:
    """A packed [E, n, m] whose experts are transposed: part `number` of `n_parts_of_columns` equal parts of the m columns, as rows."""

    def layout(shape: tuple[int, ...], n_parts: int) -> Placement:
        n_experts, n_rows, n_cols = shape
        count = n_cols // n_parts_of_columns
        return Placement((n_experts, count, n_rows), (), turned=Turned(n_rows, n_cols, number * count, count))

    return layout


def without_middle(shape: tuple[int, ...], n_parts: int) -> Placement:
    """[channels, 1, kernel] -> [channels, kernel]."""
    return Placement((shape[0], shape[-1]), (Run(0, 0, shape[0]),))


def unfused(heads: Heads, size: int, kind: str) -> Layout:
    """ "qkv" or "z" of rows that hold, for each K head in turn, its q and k and its V heads' v and z.

    Target: every head's q, then every k, then every v; or every z. V heads keep their order.
    Source: Qwen3NextModel.modify_tensors in llama.cpp conversion/qwen.py.
    """
    values = heads.per_k * size
    each = 2 * size + 2 * values
    spans = {"qkv": ((0, size), (size, size), (2 * size, values)), "z": ((2 * size + values, values),)}[kind]

    def layout(shape: tuple[int, ...], n_parts: int) -> Placement:
        runs = tuple(Run(0, head * each + offset, count) for offset, count in spans for head in range(heads.n_k))
        return Placement((sum(run.count for run in runs), shape[-1]), runs)

    return layout


def tile_rows(heads: Heads, size: int, first: int = 0) -> Layout:
    """Heads of `size` rows in target order; the rows before `first` stay. A middle dimension of 1 (conv1d) is dropped."""

    def layout(shape: tuple[int, ...], n_parts: int) -> Placement:
        runs = [Run(0, first + head * size, size) for head in heads.order()]
        return Placement((shape[0], shape[-1]), tuple([Run(0, 0, first)] * (first > 0) + runs))

    return layout


def tile_columns(heads: Heads, size: int) -> Layout:
    """Heads of `size` columns in target order; a vector is one row."""

    def layout(shape: tuple[int, ...], n_parts: int) -> Placement:
        return Placement(shape, as_it_is(shape, n_parts).runs, Columns(heads, size) if heads.per_k > 1 and heads.n_k > 1 else None)

    return layout
