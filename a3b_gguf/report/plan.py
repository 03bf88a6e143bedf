"""The tables of `a3b plan`: memory by device, choices with reasons, and the load parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from a3b_gguf.planner.plan import Budget, Plan
from a3b_gguf.report.console import say, say_table
from a3b_gguf.report.plan_bars import bar, legend, parts
from a3b_gguf.units import MIB, human_bytes

BAR_WIDTH = 64


def show_plan(plan: Plan) -> None:
    """The whole plan for a person."""
    say(headline(plan))
    show_memory(plan)
    show_bars(plan)
    say_table("Choices", ("what", "value", "why"), [(reason.choice, reason.value, reason.why) for reason in plan.reasons])
    show_speed(plan)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    say(f"load: {load_line(plan)}")


def headline(plan: Plan) -> str:
    facts, machine = plan.facts, plan.machine
    kinds = f"{facts.n_attention} attention" + (f", {facts.n_recurrent} DeltaNet" if facts.n_recurrent else "")
    used = f", {facts.n_expert_used} of {facts.n_expert} experts used" if facts.n_expert else ""
    gpus = ", ".join(f"{gpu.name} {human_bytes(gpu.total)}" for gpu in machine.gpus) or "no GPU"
    for_whom = "a described machine" if machine.described else "this machine"
    return (
        f"{facts.name}: {facts.architecture}, {facts.n_layer} layers ({kinds}){used}, weights {human_bytes(facts.weight_bytes)}\n"
        f"for {for_whom}: RAM {human_bytes(machine.ram_total)}, {gpus}, {machine.n_cores} cores\n"
    )


def show_memory(plan: Plan) -> None:
    """Terms by device in MiB; a term that is an estimate carries a ~."""
    budgets = plan.budgets
    names = list(dict.fromkeys(term.name for term in plan.terms))
    cells = {(term.name, term.device): f"{'' if term.exact else '~'}{term.n_bytes / MIB:,.1f}" for term in plan.terms}
    rows = [(name, *(cells.get((name, budget.device), "") for budget in budgets)) for name in names]
    sums: tuple[tuple[str, Callable[[Budget], int]], ...] = (
        ("in all", lambda budget: budget.need),
        ("free now", lambda budget: budget.available),
        ("left after loading", lambda budget: budget.left),
        ("of which kept free on purpose", lambda budget: budget.reserve),
    )
    rows += [("",) * (len(budgets) + 1)]
    rows += [(name, *(f"{value(budget) / MIB:,.1f}" for budget in budgets)) for name, value in sums]
    say_table("Memory in MiB (~ estimated)", ("term", *(budget.device for budget in budgets)), rows, numeric=range(1, len(budgets) + 1))


def show_bars(plan: Plan) -> None:
    """Each memory as a line of letters, one letter a share of it."""
    width = max(len(budget.device) for budget in plan.budgets)
    for budget in plan.budgets:
        drawn = bar(parts(plan, budget), BAR_WIDTH)
        say(f"{budget.device:{width}} |{drawn}| {human_bytes(budget.need)} of {human_bytes(budget.total)}")
    say(f"{'':{width}}  {legend(plan)}\n")


def show_speed(plan: Plan) -> None:
    """What is expected of one request alone, and what had to be assumed for it."""
    speed = plan.speed
    rows = (("reading a prompt", speed.prefill), ("writing, context empty", speed.decode), ("writing, context full", speed.decode_full))
    say_table(
        "Speed expected of one request, tokens/s",
        ("", "from", "to"),
        [(name, f"{span.low:,.0f}", f"{span.high:,.0f}") for name, span in rows],
        numeric=(1, 2),
    )
    for text in speed.assumed:
        say(f"assumed: {text}")


def load_line(plan: Plan) -> str:
    """Every load parameter as name=value; layers as the spans that they form."""
    values = asdict(plan.load)
    values["cpu_expert_layers"] = ",".join(map(str, plan.load.cpu_expert_layers)) or "none"
    values["tensor_overrides"] = ",".join(f"{pattern}={where}" for pattern, where in plan.load.tensor_overrides) or "none"
    values["tensor_split"] = ",".join(f"{share:g}" for share in plan.load.tensor_split) or "none"
    return " ".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items())


def as_json(plan: Plan) -> dict[str, Any]:
    """What --json prints: bytes everywhere, totals included."""
    facts = plan.facts
    return {
        "model": {
            "path": str(facts.path),
            "name": facts.name,
            "architecture": facts.architecture,
            "n_layer": facts.n_layer,
            "n_ctx_train": facts.n_ctx_train,
            "weight_bytes": facts.weight_bytes,
            "expert_bytes": facts.expert_bytes,
        },
        "machine": asdict(plan.machine),
        "terms": [asdict(term) for term in plan.terms],
        "budgets": [{**asdict(budget), "left": budget.left} for budget in plan.budgets],
        "choices": [asdict(reason) for reason in plan.reasons],
        "warnings": list(plan.warnings),
        "load": asdict(plan.load),
        "speed": asdict(plan.speed),
        "environment": dict(plan.environment),
    }
