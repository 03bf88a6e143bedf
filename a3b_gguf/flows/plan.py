"""A plan for a model: reads its sizes, measures the machine when none is described, and asks the planner."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf import gpus, probe
from a3b_gguf.flows.plan_facts import read_advice
from a3b_gguf.flows.plan_facts import read_facts as read_facts
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.table import Cell, devices, table


def plan_facts(facts: Facts, wishes: Wishes, machine: Machine | None = None) -> Plan:
    """How to load the model of `facts`; clip_bounds.bin beside its file has its say. machine: None measures the one at hand.

    Raises AnswerIsNo when it does not fit, UsageError for a wish that cannot be.
    """
    advice, note = read_advice(facts)
    facts = replace(facts, notes=(*facts.notes, note)) if note else facts
    return plan(facts, named(machine or probe.machine()), wishes, advice)


def table_of(facts: Facts, wishes: Wishes, machine: Machine | None = None) -> tuple[str, tuple[Cell, ...]]:
    """Contexts against cache types on a machine: the device whose memory the numbers are of, and a cell for each pair."""
    advice, _ = read_advice(facts)
    where = named(machine or probe.machine())
    cells = table(facts, where, wishes, advice)
    return devices(cells, where), cells


def named(machine: Machine) -> Machine:
    """`machine` with the published bandwidths of those of its GPUs that gpus.toml knows."""
    return replace(machine, gpus=tuple(gpus.known(gpu) for gpu in machine.gpus))
