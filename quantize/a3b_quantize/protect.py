"""What measured ranges say against a type: sums and products that would overflow float16, layers that hold super experts.

Applied to the decision of any policy. A replacement for an overflow is never larger than what it replaces (but for q2_k and iq1_s, where
nothing of their size is safe); a raised type is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from a3b_gguf.clip_bounds import F16_MAX, HEADROOM, Bounds, Record
from a3b_gguf.roles import layer_of, recurrent_layers
from a3b_gguf.tensors import TYPES
from a3b_quantize.assign import Assignment, fit
from a3b_quantize.weight_sites import input_site, output_site

# Types whose products on CUDA use the float16 sum of a block of Q8_1 activations, and a symmetric type instead.
# Source: mmq_get_q8_1_ds_layout in ggml-cuda/mmq.cuh, the layouts DS4 and D2S6
SYMMETRIC = {"q4_0": "iq4_nl", "q4_1": "iq4_nl", "q4_k": "iq4_nl", "q5_1": "q5_0", "q5_k": "q5_0", "q2_k": "q3_k", "iq1_s": "iq1_m"}
# A layer stands out when its largest output of a down projection is so many times that of the median layer. Super experts reach hundreds
# of times (arXiv 2507.23279), ordinary layers differ by a few.
STANDS_OUT = 10.0
FEWEST_LAYERS = 4  # of fewer a median says nothing
# Bits below which -> the type that such a tensor gets in a layer that stands out
HIGHER = ((3.0, "q3_k"), (4.0, "iq4_xs"), (5.0, "q5_k"), (6.0, "q6_k"), (8.0, "q8_0"))


@dataclass(frozen=True, slots=True)
class Standout:
    """A layer whose down projection puts out more than others: absmax, and how many times the median layer's."""

    layer: int
    absmax: float
    times: float


def protected_types(assignments: Sequence[Assignment], bounds: Bounds) -> tuple[Assignment, ...]:
    """The assignments with types changed where `bounds` say so; the reason of each says what was changed and why."""
    recurrent = recurrent_layers(each.name for each in assignments)
    ranges = {(each.layer, each.site): each for each in bounds.records if each.expert < 0}
    special = {each.layer: each for each in standouts(bounds)}
    return tuple(_safe(_raised(each, special), ranges, recurrent) for each in assignments)


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


def _raised(each: Assignment, special: dict[int, Standout]) -> Assignment:
    layer = layer_of(each.name)
    standout = special.get(layer) if layer is not None and output_site(each.name) == "down_out" else None
    if standout is None or each.type == each.source:
        return each
    higher = next((name for bits, name in HIGHER if each.type.bits_per_weight < bits), None)
    if higher is None:
        return each
    kind, _, _ = fit(TYPES[higher], each.shape[-1], "")
    if kind.bits_per_weight <= each.type.bits_per_weight:
        return each
    why = f"its output reaches {standout.absmax:,.4g}, {standout.times:,.0f} times the median layer's (super experts)"
    return replace(each, type=kind, reason=f"{each.reason}; {kind.name} instead of {each.type.name}: {why}")


def _safe(each: Assignment, ranges: dict[tuple[int, str], Record], recurrent: frozenset[int]) -> Assignment:
    layer, site = layer_of(each.name), input_site(each.name, recurrent)
    if layer is None or each.type == each.source:
        return each
    read, written = (ranges.get((layer, name)) if name else None for name in (site, output_site(each.name)))
    if read and HEADROOM * read.sum32 > F16_MAX and each.type.name in SYMMETRIC:
        kind, _, _ = fit(TYPES[SYMMETRIC[each.type.name]], each.shape[-1], "")
        why = f"a sum over 32 of {read.site} reaches {read.sum32:,.4g}, and float16 ends at {F16_MAX:,.0f}"
        return replace(each, type=kind, group_size=32, reason=f"{each.reason}; {kind.name} instead of {each.type.name}: {why}")
    large = next((record for record in (read, written) if record and HEADROOM * record.absmax > F16_MAX), None)
    if large and each.type.name == "f16":
        why = f"{large.site} reaches {large.absmax:,.4g}, and float16 ends at {F16_MAX:,.0f}"
        return replace(each, type=TYPES["bf16"], reason=f"{each.reason}; bf16 instead of f16: {why}")
    return each
