"""A wish that cannot be: what it needs, what there is, and the cheapest changes that would make it fit, each planned anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from a3b_gguf.errors import AnswerIsNo
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.changes import LADDERS, Ladder, Step, more_memory
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.place import best, closest
from a3b_gguf.planner.plan import Budget
from a3b_gguf.units import MIB, human_bytes

N_CHANGES = 3
OR = ";\n  or "  # each change on a line of its own
WORTH_A_CHANGE = 64 * MIB  # memory that need not be bought
OPTIMISM = 1.1  # two changes together may save a little more than each alone


class NoRoom(AnswerIsNo):
    """What the rule that places layers raises; `decide.plan` turns it into a refusal that helps."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(f"{draft.facts.name} does not fit")
        self.draft = draft


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change, or two together, so that it fits. n_bytes: what each frees, or adds to a memory. draft: the wish changed."""

    texts: tuple[str, ...]
    n_bytes: tuple[int, ...]
    draft: Draft

    def __str__(self) -> str:
        return " together with ".join(f"{text} ({human_bytes(n)})" for text, n in zip(self.texts, self.n_bytes, strict=True))


Replan = Callable[[Draft], bool]


def refusal(draft: Draft, fits: Replan) -> AnswerIsNo:
    """The error for a draft that fits nowhere. Its hint lists the changes, cheapest for the user first.

    fits: plans a changed draft's facts, machine and wishes from the beginning.
    """
    near = closest(draft)
    missing = "; ".join(shortage(budget) for budget in near.budgets if budget.short)
    hint = OR.join(map(str, changes_for(draft, near, fits)))
    return AnswerIsNo(f"{draft.facts.name} does not fit: {missing}", hint)


def shortage(budget: Budget) -> str:
    usable = max(0, budget.available - budget.reserve)
    what = "reserve" if budget.device == HOST else "margin"
    return (
        f"{budget.device} needs {human_bytes(budget.need)} and has {human_bytes(usable)} "
        f"({human_bytes(budget.total)}, {human_bytes(budget.total - budget.available)} in use, {human_bytes(budget.reserve)} {what})"
    )


def changes_for(draft: Draft, near: Draft, fits: Replan) -> list[Change]:
    """At most N_CHANGES: single ones first, then pairs; what has to be bought alone comes last. near: the placement nearest to fitting."""
    climbs = [Climb(rank, ladder, steps, lacking(steps[-1].draft)) for rank, ladder in enumerate(LADDERS) if (steps := list(ladder(draft)))]
    enough = {climb.ladder: found for climb in climbs if (found := mildest(climb, fits))}
    flags = [change(near, found) for ladder, found in enough.items() if ladder is not more_memory][:N_CHANGES]
    bought = [change(near, found) for ladder, found in enough.items() if ladder is more_memory][: N_CHANGES - len(flags)]
    pairs = islice(pairs_of(near, climbs, enough, fits), N_CHANGES - len(flags) - len(bought))
    return [*flags, *pairs, *bought]


@dataclass(frozen=True, slots=True)
class Climb:
    """The steps of one ladder. lacking: bytes that are missing even after the hardest."""

    rank: int
    ladder: Ladder
    steps: list[Step]
    lacking: int


def lacking(draft: Draft) -> int:
    return sum(budget.short for budget in closest(draft).budgets)


def mildest(climb: Climb, fits: Replan) -> Step | None:
    """The first step that is enough, planned anew; none where the hardest is not."""
    if climb.lacking:
        return None
    return next((step for step in climb.steps if best(step.draft) and fits(step.draft)), None)


def pairs_of(near: Draft, climbs: list[Climb], enough: dict[Ladder, Step], fits: Replan) -> Iterator[Change]:
    """The hardest step of a kind that does not help alone, with the mildest of another that then does; the cheapest kinds first.

    The other may help alone: together it is a milder step, or less memory to buy. Pairs that cannot reach are not tried.
    """
    short = sum(budget.short for budget in near.budgets)
    pairs = [(a, b) for a in climbs for b in climbs if a.lacking and a is not b and (a.rank < b.rank or not b.lacking)]
    for a, b in sorted(pairs, key=lambda pair: pair[0].rank + pair[1].rank):
        if a.lacking + b.lacking > short * OPTIMISM or a.ladder is more_memory:
            continue
        first = a.steps[-1]
        again = list(b.ladder(first.draft))
        found = next((step for step in again if best(step.draft) and fits(step.draft)), None)
        alone = enough.get(b.ladder)
        less = alone is None or (b.ladder is more_memory and found is not None and found.given < alone.given - WORTH_A_CHANGE)
        if found and (less or (alone is not None and found.text != alone.text)):
            yield change(near, first, found)


def change(near: Draft, *steps: Step) -> Change:
    """What was done, and what each step saves of the placement nearest to fitting, or gives."""
    saved, before = [], near.n_bytes
    for step in steps:
        after = before if step.given else closest(step.draft).n_bytes
        saved.append(step.given or max(0, before - after))
        before = after
    return Change(tuple(step.text for step in steps), tuple(saved), steps[-1].draft)
