"""What `a3b serve` says before and after loading: predicted memory beside what llama.cpp's allocator and its log say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from a3b_gguf.flows.checked_plan import CheckedPlan
from a3b_gguf.flows.measure import Choice
from a3b_gguf.planner.check import Check, compare
from a3b_gguf.planner.plan import Plan
from a3b_gguf.report.console import plain, say, say_table
from a3b_gguf.units import MIB, human_bytes

if TYPE_CHECKING:
    from a3b_server.messages import Facts


def show_dry_run(checked: CheckedPlan) -> None:
    """One line when the dry run agrees with the plan, else the table."""
    if checked.check is None:
        return
    if checked.check.agrees:
        differences = ", ".join(f"{device} {extra / MIB:+,.1f} MiB" for device, extra in checked.check.differences.items())
        say(f"dry run: llama.cpp's allocator agrees ({differences})")
    else:
        show_check(checked.check, "dry run")


def show_loaded(plan: Plan, facts: Facts) -> None:
    """A table of both, what the process holds, and how many expert tensors went where they were told to go."""
    show_check(compare(plan, facts.buffers), "llama.cpp")
    if facts.rss_bytes:
        say(f"the engine's process holds {human_bytes(facts.rss_bytes)} of RAM")
    if facts.n_moved:
        say(f"{facts.n_moved} expert tensors of {len(plan.load.cpu_expert_layers)} layers are in RAM, as planned")


def show_check(check: Check, found: str) -> None:
    rows = []
    for row in check.rows:
        mark = "" if row.exact else "~"
        sizes = f"{mark}{row.predicted / MIB:,.1f}", f"{row.found / MIB:,.1f}", f"{row.difference / MIB:+,.1f}"
        rows.append((row.kind, row.device, *sizes))
    say_table("Memory in MiB (~ estimated)", ("buffer", "device", "predicted", found, "difference"), rows, numeric=(2, 3, 4))


def show_choice(choice: Choice) -> None:
    """What --measure tried."""
    rows = []
    for each in choice.measured:
        load, timing = each.plan.load, each.timing
        speeds = ("", "") if timing is None else (f"{timing.prefill:,.0f}", f"{timing.decode:,.1f}")
        chosen = "kept" if each.plan.load == choice.plan.load else each.note
        layers = str(len(load.cpu_expert_layers)) if load.n_gpu_layers else ""
        rows.append((str(load.n_gpu_layers), layers, str(load.n_ubatch), str(load.n_threads), *speeds, chosen))
    say_table(
        "Measured, tokens/s",
        ("layers on GPU", "experts in RAM", "batch", "threads", "prompt", "answer", ""),
        rows,
        numeric=range(6),
    )


def measured_json(choice: Choice | None) -> list[dict[str, Any]] | None:
    """What --measure tried, without the plans themselves: their load parameters tell them apart."""
    if choice is None:
        return None
    return [{"load": plain(each.plan.load), "timing": plain(each.timing), "fits": each.fits, "note": each.note} for each in choice.measured]
