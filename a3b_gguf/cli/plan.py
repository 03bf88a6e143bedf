"""`a3b plan`: where a model goes on a machine, in bytes, how fast it is, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from a3b_gguf.cli.wishes import (
    GPU,
    RAM,
    VRAM,
    Checkpoints,
    Cores,
    CPUMoE,
    Ctx,
    CtxPerSlot,
    GPULayers,
    KeepTexts,
    KVSplit,
    KVType,
    Margin,
    Measure,
    MMProj,
    NDraft,
    NoDryRun,
    Parallel,
    RAMBandwidth,
    UBatch,
    machine_of,
    wishes_of,
)  # fmt: skip


def command(
    model: Path = typer.Argument(..., help="A .gguf file (of a split model the first part); with --type also a checkpoint or a name."),
    type_name: str | None = typer.Option(None, "--type", metavar="TYPE", help="Plan for what `a3b quantize --type TYPE` would write."),
    ctx: Ctx = None,
    vram: VRAM = None,
    gpu: GPU = None,
    ram: RAM = None,
    ram_bandwidth: RAMBandwidth = None,
    cores: Cores = None,
    parallel: Parallel = 1,
    kv_type: KVType = "auto",
    n_gpu_layers: GPULayers = None,
    n_cpu_moe: CPUMoE = None,
    ubatch: UBatch = None,
    draft: NDraft = 0,
    checkpoints: Checkpoints = None,
    keep_texts: KeepTexts = None,
    kv_split: KVSplit = False,
    ctx_per_slot: CtxPerSlot = None,
    mmproj: MMProj = None,
    margin: Margin = "1GiB",
    measure: Measure = None,
    no_dry_run: NoDryRun = False,
    table: bool = typer.Option(False, "--table", help="Contexts from 4k to 256k against cache types: what each takes, and what is left."),
    svg: Path | None = typer.Option(None, "--svg", metavar="FILE", help="Write the memory of each device as a figure."),
    export: Literal["llama-server", "ollama", "llama-swap"] | None = typer.Option(
        None, "--export", help="Print the plan as a llama-server command, an Ollama Modelfile or a llama-swap configuration."
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show how a model would be loaded: every term in bytes, every choice with its reason. Loads nothing, unless --measure is given."""
    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.plan import read_facts, table_of
    from a3b_gguf.flows.plan_here import Means, choose_plan
    from a3b_gguf.part import write_file
    from a3b_gguf.report.console import say_json
    from a3b_gguf.report.plan_forms import show_chosen
    from a3b_gguf.report.plan_svg import svg as figure
    from a3b_gguf.report.plan_table import show_table, table_json
    from a3b_gguf.report.progress import counted

    if json and export:
        raise UsageError("--json and --export both print the plan in another form", "give one of them")
    if table and (svg or export):
        raise UsageError("--table shows many plans; --svg and --export are of one", "leave one of them out")
    machine = machine_of(vram, ram, gpu, ram_bandwidth, cores)
    if measure and (table or type_name):
        raise UsageError("--measure loads the model's file", "leave --table and --type out")
    wishes = wishes_of(
        ctx, parallel, kv_type, n_gpu_layers, n_cpu_moe, margin, ubatch, draft, checkpoints, kv_split, ctx_per_slot, keep_texts
    )  # fmt: skip
    facts = read_facts(model, type_name, mmproj)
    if table:
        device, cells = table_of(facts, wishes, machine)
        if json:
            say_json(table_json(device, cells))
        else:
            show_table(facts.name, device, cells)
        return
    with counted("measuring", "placements", quiet=json or not measure) as tell:
        chosen = choose_plan(facts, wishes, machine, Means(not no_dry_run, measure or 0), tell, written=not type_name)
    if svg:
        write_file(svg, figure(chosen.plan).encode(), "--svg:")
    show_chosen(chosen, "json" if json else export)
