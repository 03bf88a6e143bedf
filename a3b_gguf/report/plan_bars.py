"""Each memory of a plan as a bar by term: shares that a terminal and a figure both draw."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from a3b_gguf.planner.plan import Budget, Plan

# Terms that are drawn as one, in the order of the bar: (label, terms, letter in a terminal, colour in a figure).
PARTS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("routed experts", ("routed experts",), "E", "#4878a8"),
    ("other weights", ("token embedding", "attention, dense and norms", "output", "MTP block", "vision encoder"), "W", "#8fb4d9"),
    ("KV cache", ("KV cache", "MTP context: KV cache"), "K", "#d98f4e"),
    ("recurrent state", ("recurrent state",), "S", "#c25b56"),
    ("checkpoints", ("checkpoints of recurrent state",), "C", "#8c6bb1"),
    ("kept texts", ("kept texts",), "T", "#b5a2cf"),
    ("buffers", (), "B", "#7a9a5b"),  # everything else
)
IN_USE, FREE, KEPT = ("in use already", "x", "#b8b8b8"), ("free", ".", "#ffffff"), ("kept free on purpose", "-", "#e8e8e8")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a bar. symbol: one character; colour: of a figure."""

    label: str
    n_bytes: int
    symbol: str
    colour: str


def parts(plan: Plan, budget: Budget) -> list[Part]:
    """What fills the memory, from what was there before to what stays free; the sum is its total."""
    known = {name: label for label, names, _, _ in PARTS for name in names}
    sums: dict[str, int] = defaultdict(int)
    shared = {gpu.name for gpu in plan.machine.gpus if gpu.shares_ram} if budget.device == plan.budgets[0].device else set()
    for term in plan.terms:
        if term.device == budget.device or term.device in shared:
            sums[known.get(term.name, "buffers")] += term.n_bytes
    drawn = [Part(IN_USE[0], budget.total - budget.available, *IN_USE[1:])]
    drawn += [Part(label, sums[label], symbol, colour) for label, _, symbol, colour in PARTS]
    kept = max(0, min(budget.reserve, budget.left))
    drawn += [Part(FREE[0], max(0, budget.left - kept), *FREE[1:]), Part(KEPT[0], kept, *KEPT[1:])]
    return [part for part in drawn if part.n_bytes > 0]


def bar(drawn: list[Part], width: int) -> str:
    """One character for each share of the width; a part that is too small to see gets none, the sum is the width."""
    total = sum(part.n_bytes for part in drawn) or 1
    text, done = "", 0
    for part in drawn:
        done += part.n_bytes
        text += part.symbol * (round(width * done / total) - len(text))
    return text


def legend(plan: Plan) -> str:
    """ "E routed experts, W other weights, ..." of what occurs."""
    found = {part.label for budget in plan.budgets for part in parts(plan, budget)}
    known = [IN_USE[:2], *((label, symbol) for label, _, symbol, _ in PARTS), FREE[:2], KEPT[:2]]
    return ", ".join(f"{symbol} {label}" for label, symbol in known if label in found)
