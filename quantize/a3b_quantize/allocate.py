"""The best type for every tensor that fits a number of bytes.

Tensors form units: gate and up of a layer's experts share a type (llama.cpp's fused kernels want that), every other tensor is its own.
The loss of a unit with a type is its sensitivity times the type's relative error; losses add up. Minimal loss under a budget is found on
the lower convex hull of each unit's (bytes, loss): upgrades are taken in the order of loss saved a byte (the Lagrangian optimum for every
budget that an upgrade ends at), then what is left of the budget is filled with whatever still fits and helps most.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from a3b_gguf.roles import layer_of
from a3b_gguf.tensors import TYPES, GGMLType
from a3b_quantize.assign import NEED_IMPORTANCE, Assignment, n_dims

# What is tried when nobody says otherwise: types that have a fast kernel, and two smaller ones. iq4_nl costs what q4_k does, and goes where
# rows do not fit a block of 256.
CANDIDATES = ("q2_k", "q3_k", "iq4_xs", "iq4_nl", "q4_k", "q5_k", "q6_k", "q8_0")
GATE_OR_UP = re.compile(r"(.*\.ffn_)(gate|up)(_exps\.weight)")


@dataclass(frozen=True, slots=True)
class Option:
    """A type for all tensors of a unit. n_bytes: what it takes in the file; loss: see the module."""

    type: GGMLType
    n_bytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that get the same type. options: by bytes, none of which another one beats in both bytes and loss."""

    names: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """types: by tensor; n_bytes and loss: of all units together."""

    types: Mapping[str, GGMLType]
    n_bytes: int
    loss: float


def grouped(assignments: Sequence[Assignment], pinned: frozenset[str] = frozenset()) -> list[tuple[Assignment, ...]]:
    """The tensors that may be given another type, in units. Those stay out that the assignments leave as floats, and `pinned` ones."""
    groups: dict[str, list[Assignment]] = {}
    for each in assignments:
        if each.type.is_float or each.name in pinned or n_dims(each.shape) < 2:
            continue
        match = GATE_OR_UP.fullmatch(each.name)
        groups.setdefault(f"{match[1]}{match[3]}" if match else each.name, []).append(each)
    return [tuple(group) for group in groups.values()]


def allowed(group: Sequence[Assignment], names: Sequence[str], weighted: bool) -> list[GGMLType]:
    """The candidate types that the rows of every tensor of a unit fit, smallest first. weighted: importance is known."""
    kinds = [TYPES[name] for name in names if weighted or name not in NEED_IMPORTANCE]
    fitting = [kind for kind in kinds if all(each.shape[-1] % kind.block == 0 for each in group)]
    return sorted(fitting, key=lambda kind: kind.bits_per_weight)


def unit(group: Sequence[Assignment], options: Mapping[str, float], n_bytes: Callable[[int], int]) -> Unit:
    """A unit from the loss of each type by name. n_bytes: what a tensor of so many bytes takes."""
    found = [Option(TYPES[name], sum(n_bytes(TYPES[name].nbytes(each.shape)) for each in group), loss) for name, loss in options.items()]
    best: list[Option] = []
    for option in sorted(found, key=lambda option: (option.n_bytes, option.loss)):
        if not best or option.loss < best[-1].loss:
            best.append(option)
    return Unit(tuple(each.name for each in group), tuple(best))


def smallest(units: Sequence[Unit]) -> int:
    """Bytes that the units take at least."""
    return sum(each.options[0].n_bytes for each in units)


def largest(units: Sequence[Unit]) -> int:
    """Bytes of the choice without regard to bytes: more would not lose less."""
    return sum(each.options[-1].n_bytes for each in units)


def choose(units: Sequence[Unit], budget: int) -> Chosen:
    """The choice of least loss in `budget` bytes, near enough: see the module. Raises ValueError when even the smallest is larger."""
    left = budget - smallest(units)
    if left < 0:
        raise ValueError(f"{budget:,} bytes are too few, {smallest(units):,} are needed")
    at = [0] * len(units)
    left = _fill(units, at, _climb(units, at, left))
    _exchange(units, at, left)
    picked = [each.options[i] for each, i in zip(units, at, strict=True)]
    types = {name: option.type for each, option in zip(units, picked, strict=True) for name in each.names}
    return Chosen(types, sum(option.n_bytes for option in picked), sum(option.loss for option in picked))


def hull(options: Sequence[Option]) -> list[int]:
    """Indices of the lower convex hull: from each to the next, the loss saved a byte gets smaller."""
    kept: list[int] = []
    for index, option in enumerate(options):
        while len(kept) > 1 and _slope(options[kept[-2]], options[kept[-1]]) <= _slope(options[kept[-1]], option):
            kept.pop()
        kept.append(index)
    return kept


def _slope(lower: Option, upper: Option) -> float:
    """Loss saved a byte."""
    return (lower.loss - upper.loss) / max(upper.n_bytes - lower.n_bytes, 1)


def _climb(units: Sequence[Unit], at: list[int], left: int) -> int:
    """Takes upgrades along the hulls until the best one does not fit. Returns the bytes that are left."""
    hulls = [hull(each.options) for each in units]
    heap: list[tuple[float, int, int]] = []

    def push(number: int, step: int) -> None:
        if step + 1 < len(hulls[number]):
            a, b = (units[number].options[hulls[number][i]] for i in (step, step + 1))
            heapq.heappush(heap, (-_slope(a, b), number, step + 1))

    for number in range(len(units)):
        push(number, 0)
    while heap:
        _, number, step = heapq.heappop(heap)
        option = units[number].options[hulls[number][step]]
        cost = option.n_bytes - units[number].options[at[number]].n_bytes
        if cost > left:
            continue  # this unit has reached its end; cheaper ones behind it may still fit
        left -= cost
        at[number] = hulls[number][step]
        push(number, step)
    return left


def _fill(units: Sequence[Unit], at: list[int], left: int) -> int:
    """Spends what is left: the upgrade that saves most and fits, again and again."""
    while True:
        best, saved = None, 0.0
        for number, each in enumerate(units):
            now = each.options[at[number]]
            for index in range(at[number] + 1, len(each.options)):
                option = each.options[index]
                if option.n_bytes - now.n_bytes <= left and now.loss - option.loss > saved:
                    best, saved = (number, index), now.loss - option.loss
        if best is None:
            return left
        number, index = best
        left -= units[number].options[index].n_bytes - units[number].options[at[number]].n_bytes
        at[number] = index


def _exchange(units: Sequence[Unit], at: list[int], left: int) -> None:
    """One unit down a step and another one up, as long as that saves and fits: closes the gap that whole steps leave."""
    for _ in range(4 * len(units)):
        best, saved = None, 1e-15
        for down, each in enumerate(units):
            if not at[down]:
                continue
            lower, now = each.options[at[down] - 1], each.options[at[down]]
            room, lost = left + now.n_bytes - lower.n_bytes, lower.loss - now.loss
            for up, other in enumerate(units):
                if up == down:
                    continue
                standing = other.options[at[up]]
                for index in range(at[up] + 1, len(other.options)):
                    option = other.options[index]
                    gain = standing.loss - option.loss - lost
                    if option.n_bytes - standing.n_bytes <= room and gain > saved:
                        best, saved = (down, up, index), gain
        if best is None:
            return
        down, up, index = best
        left += units[down].options[at[down]].n_bytes - units[down].options[at[down] - 1].n_bytes
        left -= units[up].options[index].n_bytes - units[up].options[at[up]].n_bytes
        at[down] -= 1
        at[up] = index


def by_layer(name: str, n_layer: int) -> float | None:
    """Where a tensor lies between the first layer, 0, and the last, 1; None outside the layers of the trunk."""
    layer = layer_of(name)
    return None if layer is None or layer >= n_layer else layer / max(n_layer - 1, 1)
