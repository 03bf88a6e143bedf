"""`a3b plan`: where a model goes on a machine, in bytes, and why."""

from __future__ import annotations

from pathlib import Path

import typer

from a3b_gguf.cli.wishes import RAM, VRAM, CPUMoE, Ctx, GPULayers, KVType, Margin, Parallel, machine_of, wishes_of


def command(
    model: Path = typer.Argument(..., help="A .gguf file; of a split model the first part."),
    ctx: Ctx = None,
    vram: VRAM = None,
    ram: RAM = None,
    parallel: Parallel = 1,
    kv_type: KVType = "auto",
    n_gpu_layers: GPULayers = None,
    n_cpu_moe: CPUMoE = None,
    margin: Margin = "1GiB",
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show how a model would be loaded: every term in bytes, every choice with its reason. Reads the header only, loads nothing."""
    from a3b_gguf.flows.plan import plan_file
    from a3b_gguf.report.console import say_json
    from a3b_gguf.report.plan import as_json, show_plan

    plan = plan_file(model, wishes_of(ctx, parallel, kv_type, n_gpu_layers, n_cpu_moe, margin), machine_of(vram, ram))
    if json:
        say_json(as_json(plan))
    else:
        show_plan(plan)
