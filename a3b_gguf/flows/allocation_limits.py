"""What measured ranges ask of an allocation: types that a tensor must not get, and what keeping to that costs in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from a3b_gguf.errors import UsageError
from a3b_gguf.tensors import GGMLType
from a3b_quantize.allocate import Unit
from a3b_quantize.assign import Assignment
from a3b_quantize.protect import Limit

SHOWN = 3  # protections that a message names before "and n more"

Limits = Mapping[str, Limit]


@dataclass(frozen=True, slots=True)
class Protection:
    """Tensors of one unit that ranges limit. rule: what they may be; n_bytes: how much larger their smallest choice is for it."""

    names: tuple[str, ...]
    rule: str
    why: str
    n_bytes: int

    def __str__(self) -> str:
        return f"{' and '.join(self.names)} {self.rule}, {self.n_bytes:+,} bytes"


def limited(group: Sequence[Assignment], kinds: Sequence[GGMLType], limits: Limits) -> list[GGMLType]:
    """Those of `kinds` that the ranges allow for every tensor of a unit, and always the floor itself; smallest first.

    Raises UsageError when nothing is left.
    """
    found = [limits[each.name] for each in group if each.name in limits]
    floors = [limit.floor for limit in found if limit.floor]
    left = {kind.name: kind for kind in (*kinds, *floors) if all(limit.allows(kind) for limit in found)}
    if not left and kinds:
        raise UsageError(
            f"--candidates: none is safe for {group[0].name}: {found[0].why}",
            "add iq4_nl, iq4_xs or q8_0; or take --imatrix instead of --calibration, which protects nothing",
        )
    return sorted(left.values(), key=lambda kind: kind.bits_per_weight)


def protections(units: Sequence[Unit], free: Sequence[Unit], limits: Limits) -> tuple[Protection, ...]:
    """What the limits cost, dearest first. free: the same units without them."""
    found = []
    for each, other in zip(units, free, strict=True):
        first = next((limits[name] for name in each.names if name in limits), None)
        if first is not None:
            least = each.options[0].n_bytes - other.options[0].n_bytes
            found.append(Protection(tuple(name for name in each.names if name in limits), _rule(first), first.why, least))
    return tuple(sorted(found, key=lambda each: -each.n_bytes))


def told(found: Sequence[Protection]) -> str:
    """A clause that names the dearest."""
    names = "; ".join(str(each) for each in found[:SHOWN])
    return names + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _rule(limit: Limit) -> str:
    floor = f"at least {limit.floor.name}" if limit.floor else ""
    unsafe = f"not {', '.join(sorted(limit.unsafe - {'f16'}))}" if limit.unsafe - {"f16"} else ""
    return " and ".join(filter(None, (floor, unsafe)))
