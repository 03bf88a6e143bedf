"""A plan while it is being made: each rule takes one and returns one with a choice more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from a3b_gguf.clip_bounds import KVAdvice
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement, place
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Term
from a3b_gguf.memory.terms import all_terms
from a3b_gguf.planner.plan import Budget, Reason, Wishes, budgets
from a3b_gguf.planner.speed import Speed, predict


@dataclass(frozen=True, slots=True)
class Draft:
    """The choices so far. Rules change it through `dataclasses.replace`, `arranged`, `because` and `warn`.

    advice: the smallest cache types that the model's measured activations allow, or None when nobody measured them.
    """

    facts: Facts
    machine: Machine
    wishes: Wishes
    settings: Settings
    placement: Placement
    advice: KVAdvice | None = None
    n_threads: int = 1
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        return all_terms(self.facts, self.machine.gpus, self.placement, self.settings)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return budgets(self.terms, self.machine, self.wishes.margin)

    @property
    def speed(self) -> Speed:
        return predict(self.facts, self.machine, self.placement, self.settings)

    @property
    def n_bytes(self) -> int:
        return sum(term.n_bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        return not any(budget.short for budget in self.budgets)

    def because(self, choice: str, value: str, why: str) -> Draft:
        return replace(self, reasons=(*self.reasons, Reason(choice, value, why)))

    def warn(self, text: str) -> Draft:
        return replace(self, warnings=(*self.warnings, text))

    def arranged(self, n_gpu_layers: int, tensor_split: tuple[int, ...] = ()) -> Draft:
        """With layers on their devices and all their experts with them."""
        return self.settled(place(self.facts.n_layer_all, self.machine.gpus, n_gpu_layers, tensor_split))

    def with_cpu_experts(self, layers: tuple[int, ...], tensors: tuple[tuple[int, str], ...] = ()) -> Draft:
        """The same layers, with experts of some of them in RAM."""
        return self.settled(self.placement.with_cpu_experts(layers, tensors))

    def settled(self, placement: Placement) -> Draft:
        """With a placement, and the load mode that follows from it."""
        return replace(self, placement=placement, settings=replace(self.settings, use_mmap=maps_file(self.facts, placement)))


def maps_file(facts: Facts, placement: Placement) -> bool:
    """Whether the file is mapped: not when weights in RAM would be copied anyway (repacked rows, or pinned pages for a GPU)."""
    if not placement.uses_gpu:
        return not any(layer.repacked for layer in facts.layers)
    return not placement.has_overrides and HOST not in placement.layers[: facts.n_layer]


def blank(facts: Facts, machine: Machine, wishes: Wishes, advice: KVAdvice | None = None) -> Draft:
    """Nothing chosen yet: everything in RAM."""
    return Draft(facts, machine, wishes, Settings(n_ctx=256), place(facts.n_layer_all, (), 0), advice)
