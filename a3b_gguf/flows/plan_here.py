"""The plan by which a model is loaded on this machine: measured, remembered or computed, and checked by a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from a3b_gguf import probe
from a3b_gguf.errors import A3BError, MachineLacks
from a3b_gguf.flows.attention import with_attention
from a3b_gguf.flows.checked_plan import CheckedPlan, check_plan, checked_plan
from a3b_gguf.flows.measure import Choice, Tell, measure_plans, remembered
from a3b_gguf.flows.plan import named, plan_facts
from a3b_gguf.interrupts import deaf_children
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.plan import Plan, Wishes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True)
class Means:
    """How sure a plan has to be. dry_run: tried on llama.cpp's allocator; measure: placements to load in turn, 0 for none."""

    dry_run: bool = True
    measure: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """choice: what --measure tried, if it was asked for."""

    checked: CheckedPlan
    choice: Choice | None = None

    @property
    def plan(self) -> Plan:
        """The plan, with what checking it said among its warnings. Of a described machine nothing else was to be expected."""
        plan, notes = self.checked.plan, self.checked.notes
        return plan if plan.machine.described else replace(plan, warnings=(*plan.warnings, *notes))


def choose_plan(
    facts: Facts, wishes: Wishes, machine: Machine | None, means: Means, tell: Tell, written: bool = True
) -> Chosen:
    """The plan for a model. machine: None for the one at hand, which is measured in a process of its own. written: there is a file;
    otherwise it is what quantizing would write, which nobody can try.

    Raises AnswerIsNo when it does not fit, UsageError for a wish that cannot be.
    """
    here = with_attention(facts, wishes, named(machine or machine_here()))
    if not written:
        return Chosen(CheckedPlan(plan_facts(facts, wishes, here), None))
    if means.measure:
        choice = measure_plans(facts, wishes, here, means.measure, tell)
        return Chosen(CheckedPlan(choice.plan, None), choice)
    known = remembered(facts, wishes, here)
    if known is not None:
        return Chosen(check_plan(known) if means.dry_run else CheckedPlan(known, None))
    return Chosen(checked_plan(facts, wishes, here, dry=means.dry_run))


def machine_here() -> Machine:
    """The machine at hand. Asking a GPU for its memory opens it, which takes some of it for as long as the process lives: a server's
    lives long, so a child asks."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_tell_machine, args=(theirs,), daemon=True)
    with deaf_children():
        child.start()
    theirs.close()  # or its end would not be noticed
    try:
        told: Machine | A3BError = ours.recv()
    except EOFError as error:
        child.join()
        message = f"the process that asked for this machine's GPUs ended with {child.exitcode}"
        raise MachineLacks(message, "look at the driver, or plan without asking it: --vram and --ram describe the machine") from error
    finally:
        child.kill()
        child.join()
    if isinstance(told, A3BError):
        raise told
    return told


def _tell_machine(pipe: Connection) -> None:
    try:
        pipe.send(probe.machine())
    except A3BError as error:
        pipe.send(error)


def refuse_absent_gpus(plan: Plan) -> None:
    """A plan for a described machine can be read anywhere, but served only where its GPUs are. Raises MachineLacks."""
    used = {term.device for term in plan.terms} - {HOST}
    if plan.machine.described and used:
        found = len(machine_here().gpus)
        if found < len(used):
            message = f"the plan uses {len(used)} GPU{'s' if len(used) > 1 else ''}, llama.cpp finds {found or 'none'} on this machine"
            raise MachineLacks(message, "leave --vram out to plan for this machine, or say --vram 0; --dry-run only shows the plan")
