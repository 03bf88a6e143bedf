"""Sums of squares of what goes into each weight: the numbers of an importance matrix.

As llama.cpp's own tool collects them (tools/imatrix/imatrix.cpp, collect_imatrix), but summed in float64, short batches included, and
once for all weights that share an input (query, key and value; gate and up of the experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.watch import Node
from a3b_quantize.imatrix import ImatrixEntry

OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"  # the output too, where a model ties them


@dataclass(slots=True)
class Sums:
    """sums: float64 [matrices, columns], x^2 over tokens; counts: int64 [matrices], tokens; capped: like sums, of min(|x|, cap)."""

    sums: NDArray[np.float64] = field(repr=False)
    counts: NDArray[np.int64] = field(repr=False)
    capped: NDArray[np.float64] | None = field(default=None, repr=False)


# (weight, matrices, columns) -> the largest magnitude that counts, float32 [matrices]
Caps = Callable[[str, int, int], NDArray[np.float32]]


class Inputs:
    """Observer. groups: by the first weight that an input went into; group_of: weight -> the name of its group.

    wanted: whether a weight is to be observed; caps: for sums of capped squares beside the plain ones.
    """

    def __init__(self, wanted: Callable[[str], bool], caps: Caps | None = None) -> None:
        self.groups: dict[str, Sums] = {}
        self.group_of: dict[str, str] = {}
        self._wanted, self._caps = wanted, caps
        self._cap_of: dict[str, NDArray[np.float32]] = {}
        self._seen: dict[tuple[int, int], str] = {}

    def begin(self) -> None:
        self._seen.clear()

    def wants(self, node: Node) -> bool:
        op = node.op
        if op not in ("MUL_MAT", "MUL_MAT_ID"):
            return False
        weight = node.source(0).name
        if not self._wanted(weight) or not node.source(1).readable:
            return False
        group = self._seen.get(_key(node))
        if group is None:
            return True
        self._join(weight, group)
        return False

    def receive(self, node: Node) -> bool:
        from a3b_quantize.accumulate import add_capped_squares, add_squares

        weight, values = node.source(0), node.source(1).values()
        name = weight.name
        if values is None:
            return True
        group = self._join(name, name)
        self._seen[_key(node)] = group
        inputs, owners, n_owners = _by_owner(node, values, weight.shape)
        if group not in self.groups:
            self.groups[group] = Sums(np.zeros((n_owners, inputs.shape[-1])), np.zeros(n_owners, np.int64))
        found = self.groups[group]
        add_squares(inputs, owners, found.sums, found.counts)
        good = found.sums <= np.finfo(np.float32).max  # what the file can hold; NaN is not
        if not good.all():
            matrix, column = np.argwhere(~good)[0]
            raise BadInput(
                f"what goes into {name}{f', expert {matrix}' if n_owners > 1 else ''}, channel {column}, is not finite or too large",
                "the model is damaged, or overflows on this machine; `a3b inspect` its clip_bounds.bin to see where it begins",
            )
        if self._caps is not None:
            if found.capped is None:
                found.capped = np.zeros_like(found.sums)
            if group not in self._cap_of:
                self._cap_of[group] = self._caps(name, *found.sums.shape)
            add_capped_squares(inputs, owners, found.capped, self._cap_of[group])
        return True

    def _join(self, weight: str, group: str) -> str:
        """The group of `weight`, which the first batch decides: the graphs of all batches have the same form."""
        known = self.group_of.setdefault(weight, group)
        if known != group:
            raise RuntimeError(f"{weight} shares its input with {group} in one graph and with {known} in another")
        return known

    def entries(self, capped: bool = False) -> dict[str, ImatrixEntry]:
        """What an imatrix file holds, by weight."""
        return entries(self.groups, self.group_of, capped)


def entries(groups: Mapping[str, Sums], group_of: Mapping[str, str], capped: bool = False) -> dict[str, ImatrixEntry]:
    """Sums and counts by weight, in float32. capped: the sums of capped squares."""
    found: dict[str, ImatrixEntry] = {}
    made: dict[str, ImatrixEntry] = {}
    for weight, group in group_of.items():
        if group not in made:
            sums = groups[group].capped if capped else groups[group].sums
            if sums is None:
                raise ValueError(f"{group}: no capped sums were collected")
            made[group] = ImatrixEntry(sums.astype(np.float32), groups[group].counts.astype(np.float32))
        found[weight] = made[group]
    return found


def _key(node: Node) -> tuple[int, int]:
    """What two operations share when they read the same input for the same experts."""
    return node.source(1).address, node.source(2).address if node.op == "MUL_MAT_ID" else 0


def _by_owner(
    node: Node, values: NDArray[np.float32], weight: tuple[int, int, int, int]
) -> tuple[NDArray[np.float32], NDArray[np.int32], int]:
    """Inputs [tokens, inputs, columns], which matrix of the weight each goes into [tokens, used], and how many matrices there are."""
    shape = node.source(1).shape  # [1, tokens, inputs, columns] of MUL_MAT_ID, [batch, batch, tokens, columns] of MUL_MAT
    inputs = np.ascontiguousarray(values).reshape(-1, shape[2], shape[3])
    if node.op == "MUL_MAT_ID":
        ids = node.source(2).values()
        if ids is None:
            raise RuntimeError(f"{node.source(0).name}: ids of experts are not int32")
        return inputs, np.ascontiguousarray(ids, np.int32).reshape(shape[1], -1), weight[1]
    # A weight of several matrices meets an input of several batches: batch b goes into matrix b, modulo how many there are.
    outer, inner = np.divmod(np.arange(shape[0] * shape[1]), shape[1])
    matrix = (outer % weight[0]) * weight[1] + inner % weight[1]
    rows = np.repeat(matrix.astype(np.int32), shape[2]).reshape(-1, shape[2])
    return inputs, rows, weight[0] * weight[1]
