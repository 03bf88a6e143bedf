"""Plans that are worth measuring against each other: the planner's own, and neighbours in what no arithmetic settles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from a3b_gguf.clip_bounds import KVAdvice
from a3b_gguf.errors import A3BError
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes

UBATCHES = (512, 1024, 2048)
FURTHER_LAYERS = (1, 2)  # expert layers more in RAM than the fewest that fit: a GPU with air may be faster


def candidates(facts: Facts, machine: Machine, wishes: Wishes, most: int, advice: KVAdvice | None = None) -> tuple[Plan, ...]:
    """At most `most` plans that fit, the planner's own first, the others by predicted speed. What was asked for is never varied.

    Raises what planning raises when nothing fits.
    """
    own = plan(facts, machine, wishes, advice)
    others = []
    for wished, cores in variations(own):
        try:
            others.append(plan(facts, replace(machine, n_cores=cores), wished, advice))
        except A3BError:  # this neighbour does not fit, which is no news
            continue
    seen, kept = {own.load}, [own]
    for other in sorted(others, key=lambda each: each.speed.turn_seconds):
        if other.load not in seen and len(kept) < most:
            seen.add(other.load)
            kept.append(other)
    return tuple(kept)


def variations(own: Plan) -> Iterator[tuple[Wishes, int]]:
    """Wishes and cores that differ from the plan's in one thing or two."""
    wishes, cores = own.wishes, own.machine.n_cores
    batches = UBATCHES if wishes.n_ubatch is None else (wishes.n_ubatch,)
    n_cpu_moe = len(own.placement.cpu_experts)
    movable = own.placement.uses_gpu and own.placement.has_overrides and not wishes.by_hand
    layers = [wishes.n_cpu_moe, *(n_cpu_moe + more for more in FURTHER_LAYERS if movable)]
    threads = {cores, max(1, cores - 1)} if own.placement.has_overrides or not own.placement.uses_gpu else {cores}
    for n_ubatch in batches:
        for n_moe in layers:
            for n_threads in sorted(threads, reverse=True):
                rows = min(n_ubatch, own.load.n_ctx)
                yield replace(wishes, n_ubatch=rows, n_cpu_moe=n_moe), n_threads
