"""A plan that llama.cpp's own allocator has agreed to: planned, tried without allocating, planned once more if it disagrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from a3b_gguf.errors import MachineLacks
from a3b_gguf.flows.plan import plan_facts
from a3b_gguf.llama.dry_run import DryRun, dry_run
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.check import Check, compare
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.units import mib

Try = Callable[[Path, LoadParams], DryRun]


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """check: None when there was no dry run, and then `notes` say why."""

    plan: Plan
    check: Check | None
    notes: tuple[str, ...] = ()


def checked_plan(facts: Facts, wishes: Wishes, machine: Machine, attempt: Try = dry_run, dry: bool = True) -> CheckedPlan:
    """How to load the model of `facts`, checked by a dry run. Raises what planning raises, and BadInput for a file that cannot be loaded.

    When llama.cpp takes over 2 % more or less than predicted on a device, it is planned once more with what it really takes.
    """
    first = CheckedPlan(plan_facts(facts, wishes, machine), None)
    if dry:
        first = check_plan(first.plan, attempt)
    if first.check is None or first.check.agrees:
        return first
    second = check_plan(plan_facts(facts, wishes, corrected(machine, first.check)), attempt)
    said = ", ".join(f"{device} {mib(extra)}" for device, extra in first.check.differences.items() if extra)
    note = f"llama.cpp's allocator differed from the first plan ({said}), so it was planned once more with its numbers"
    return replace(second, notes=(*second.notes, note))


def check_plan(plan: Plan, attempt: Try = dry_run) -> CheckedPlan:
    """One plan beside a dry run of it. Raises BadInput for a file that cannot be loaded."""
    why_not = no_dry_run(plan)
    if why_not:
        return CheckedPlan(plan, None, (why_not,))
    try:
        return CheckedPlan(plan, compare(plan, attempt(plan.facts.path, plan.load).buffers))
    except MachineLacks as error:
        return CheckedPlan(plan, None, (f"no dry run: {error.message}",))


def corrected(machine: Machine, check: Check) -> Machine:
    """`machine` with as much less (or more) free memory as llama.cpp takes beyond the plan."""
    extra = check.differences
    gpus = tuple(replace(gpu, free=max(0, gpu.free - extra.get(gpu.name, 0))) for gpu in machine.gpus)
    return replace(machine, gpus=gpus, ram_available=max(0, machine.ram_available - extra.get(HOST, 0)))


def no_dry_run(plan: Plan) -> str:
    """Why llama.cpp cannot be asked here, or ""."""
    if not plan.facts.path.is_file():
        return "no dry run: the model's file is not here"
    if plan.machine.described and any(term.device != HOST for term in plan.terms):
        return "no dry run: the GPUs are described, not here"
    return ""
