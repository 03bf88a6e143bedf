"""The forms in which a plan is printed: for a person, as JSON, as another program's configuration."""

from __future__ import annotations

from a3b_gguf.flows.plan_here import Chosen
from a3b_gguf.report.console import note, say, say_json
from a3b_gguf.report.plan import as_json, show_plan
from a3b_gguf.report.plan_export import EXPORTS
from a3b_gguf.report.serve import measured_json, show_choice, show_dry_run


def show_chosen(chosen: Chosen, form: str | None) -> None:
    """form: "json", a name of EXPORTS, or None for a person."""
    plan, check = chosen.plan, chosen.checked.check
    if form == "json":
        say_json(as_json(plan) | {"dry_run": check and check.rows, "measured": measured_json(chosen.choice)})
    elif form:
        say(EXPORTS[form](plan).rstrip("\n"))
        for warning in plan.warnings:
            note(f"warning: {warning}")
    else:
        show_plan(plan)
        show_dry_run(chosen.checked)
        if chosen.choice:
            show_choice(chosen.choice)
