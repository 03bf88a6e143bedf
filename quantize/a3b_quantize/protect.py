"""What measured ranges say against a type: sums and products that would overflow float16, layers that hold super experts.

Applied to the decision of any policy (`protected_types`), or as limits within which an allocation chooses (`limits`). A replacement for an
overflow is never larger than what it replaces (but for q2_k and iq1_s, where nothing of their size is safe); a raised type is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from a3b_gguf.clip_bounds import F16_MAX, HEADROOM, SHARED_DOWN_IN, Bounds, Record
from a3b_gguf.roles import layer_of, recurrent_layers
from a3b_gguf.tensors import TYPES, GGMLType
from a3b_quantize.assign import Assignment, fit
from a3b_quantize.weight_sites import input_site, output_site

# Types whose products on CUDA use the float16 sum of a block of Q8_1 activations, and a symmetric type instead.
# Source: mmq_get_q8_1_ds_layout in ggml-cuda/mmq.cuh, the layouts DS4 and D2S6
SYMMETRIC = {"q4_0": "iq4_nl", "q4_1": "iq4_nl", "q4_k": "iq4_nl", "q5_1": "q5_0", "q5_k": "q5_0", "q2_k": "q3_k", "iq1_s": "iq1_m"}
MAY_OVERFLOW = (*SYMMETRIC, "f16")
# A layer stands out when its largest output of a down projection is so many times that of the median layer. Super experts reach hundreds
# of times (arXiv 2507.23279), ordinary layers differ by a few.
STANDS_OUT = 10.0
FEWEST_LAYERS = 4  # of fewer a median says nothing
# Bits below which -> the type that such a tensor gets in a layer that stands out
HIGHER = ((3.0, "q3_k"), (4.0, "iq4_xs"), (5.0, "q5_k"), (6.0, "q6_k"), (8.0, "q8_0"))
MOST_FLOOR = "q5_k"  # what an allocation is asked for at most: beyond it, bytes are better spent by what they save

Ranges = Mapping[tuple[int, str], Record]


@dataclass(frozen=True, slots=True)
class Standout:
    """A layer whose down projection puts out more than others: absmax, and how many times the median layer's."""

    layer: int
    absmax: float
    times: float


@dataclass(frozen=True, slots=True)
class Limit:
    """What an allocation may choose for a tensor. floor: it gets at least the bits of this type, None: any; unsafe: types that it never
    gets; why: one clause for people."""

    floor: GGMLType | None
    unsafe: frozenset[str]
    why: str

    def allows(self, kind: GGMLType) -> bool:
        return kind.name not in self.unsafe and (self.floor is None or kind.bits_per_weight >= self.floor.bits_per_weight)


def protected_types(assignments: Sequence[Assignment], bounds: Bounds) -> tuple[Assignment, ...]:
    """The assignments with types changed where `bounds` say so; the reason of each says what was changed and why."""
    recurrent = recurrent_layers(each.name for each in assignments)
    ranges = _ranges(assignments, bounds)
    special = {each.layer: each for each in standouts(bounds)}
    return tuple(_safe(_raised(each, special), ranges, recurrent) for each in assignments)


def limits(assignments: Sequence[Assignment], bounds: Bounds) -> dict[str, Limit]:
    """By tensor, of those that `bounds` limit. assignments: what a recipe gives, before it is protected.

    The floor of a down projection in a layer that stands out is the type that the recipe's is raised to, but at most MOST_FLOOR.
    """
    recurrent, ranges = recurrent_layers(each.name for each in assignments), _ranges(assignments, bounds)
    special = {each.layer: each for each in standouts(bounds)}
    found = {}
    for each in assignments:
        read, _ = _read_and_written(each.name, ranges, recurrent)
        unsafe = frozenset(kind for kind in MAY_OVERFLOW if _safe(replace(each, type=TYPES[kind]), ranges, recurrent).type.name != kind)
        standout = _standout(each.name, special)
        floor = _safe(_floor(each, special), ranges, recurrent).type if standout else None
        why = "; ".join((*((_stands_out(standout),) if standout else ()), *((_overflow(read),) if read and _sum_overflows(read) else ())))
        if why and each.type != each.source:
            found[each.name] = Limit(floor, unsafe, why)
    return found


def standouts(bounds: Bounds) -> tuple[Standout, ...]:
    """Layers that hold super experts, as far as the ranges tell."""
    found = bounds.of("down_out")
    usual = median(each.absmax for each in found.values()) if len(found) >= FEWEST_LAYERS else 0.0
    if not usual:
        return ()
    return tuple(
        Standout(layer, each.absmax, each.absmax / usual) for layer, each in sorted(found.items()) if each.absmax >= STANDS_OUT * usual
    )


def overflows(bounds: Bounds) -> tuple[Record, ...]:
    """Records whose sum over 32 channels, or whose values, come too near to the end of float16. HEADROOM: another text may go further."""
    return tuple(each for each in bounds.records if each.expert < 0 and HEADROOM * max(each.sum32, each.absmax) > F16_MAX)


def _ranges(assignments: Sequence[Assignment], bounds: Bounds) -> Ranges:
    """Records by layer and site: those of all experts, and the shared experts' under SHARED_DOWN_IN."""
    n_experts = {layer_of(each.name): each.shape[0] for each in assignments if "_exps." in each.name and len(each.shape) == 3}
    found = {(each.layer, each.site): each for each in bounds.records if each.expert < 0}
    shared = (each for each in bounds.records if each.site == "down_in" and each.expert == n_experts.get(each.layer))
    return found | {(each.layer, SHARED_DOWN_IN): each for each in shared}


def _read_and_written(name: str, ranges: Ranges, recurrent: frozenset[int]) -> tuple[Record | None, Record | None]:
    """The ranges of what the weight `name` reads and of what it writes, as far as they were measured."""
    layer = layer_of(name)
    sites = (input_site(name, recurrent), output_site(name))
    read, written = (ranges.get((layer, site)) if layer is not None and site else None for site in sites)
    return read, written


def _standout(name: str, special: Mapping[int, Standout]) -> Standout | None:
    layer = layer_of(name)
    return special.get(layer) if layer is not None and output_site(name) == "down_out" else None


def _floor(each: Assignment, special: Mapping[int, Standout]) -> Assignment:
    raised, most = _raised(each, special), fit(TYPES[MOST_FLOOR], each.shape[-1], "")[0]
    return raised if raised.type.bits_per_weight < most.bits_per_weight else replace(each, type=most)


def _sum_overflows(read: Record) -> bool:
    return HEADROOM * read.sum32 > F16_MAX


def _stands_out(standout: Standout) -> str:
    return f"its output reaches {standout.absmax:,.4g}, {standout.times:,.0f} times the median layer's (super experts)"


def _overflow(read: Record) -> str:
    shared = " of the shared expert" if read.expert >= 0 else ""
    return f"a sum over 32 of {read.site}{shared} reaches {read.sum32:,.4g}, and float16 ends at {F16_MAX:,.0f}"


def _raised(each: Assignment, special: Mapping[int, Standout]) -> Assignment:
    standout = _standout(each.name, special)
    if standout is None or each.type == each.source:
        return each
    higher = next((name for bits, name in HIGHER if each.type.bits_per_weight < bits), None)
    if higher is None:
        return each
    kind, _, _ = fit(TYPES[higher], each.shape[-1], "")
    if kind.bits_per_weight <= each.type.bits_per_weight:
        return each
    return replace(each, type=kind, reason=f"{each.reason}; {kind.name} instead of {each.type.name}: {_stands_out(standout)}")


def _safe(each: Assignment, ranges: Ranges, recurrent: frozenset[int]) -> Assignment:
    if each.type == each.source:
        return each
    read, written = _read_and_written(each.name, ranges, recurrent)
    if read and _sum_overflows(read) and each.type.name in SYMMETRIC:
        kind, _, _ = fit(TYPES[SYMMETRIC[each.type.name]], each.shape[-1], "")
        why = f"{each.reason}; {kind.name} instead of {each.type.name}: {_overflow(read)}"
        return replace(each, type=kind, group_size=32, reason=why)
    large = next((record for record in (read, written) if record and HEADROOM * record.absmax > F16_MAX), None)
    if large and each.type.name == "f16":
        why = f"{large.site} reaches {large.absmax:,.4g}, and float16 ends at {F16_MAX:,.0f}"
        return replace(each, type=TYPES["bf16"], reason=f"{each.reason}; bf16 instead of f16: {why}")
    return each
