"""The flags that `a3b plan` and `a3b serve` share: what is wished, and which machine it is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from a3b_gguf.machine import Machine
    from a3b_gguf.planner.plan import Wishes

Ctx = Annotated[str | None, typer.Option("--ctx", help="Tokens of context, like 64000 or 64k. [default: 32768, or all that the model has]")]
CtxPerSlot = Annotated[
    str | None,
    typer.Option("--ctx-per-slot", help="Tokens of context for each slot, in a cache of its own, instead of --ctx that all slots share."),
]
Parallel = Annotated[int, typer.Option("--parallel", help="Requests answered at the same time; they share the context.")]
KVType = Annotated[str, typer.Option("--kv-type", help="auto, a type like f16, q8_0 or q4_0, or two as K/V.")]
GPULayers = Annotated[int | None, typer.Option("--n-gpu-layers", help="Layers on the GPUs, the output counted as one. [default: planned]")]
CPUMoE = Annotated[int | None, typer.Option("--n-cpu-moe", help="Layers whose routed experts stay in RAM. [default: planned]")]
Margin = Annotated[str, typer.Option("--margin", help="Memory to leave free on every GPU.")]
VRAM = Annotated[
    list[str] | None,
    typer.Option("--vram", help="Plan for a GPU of this size, like 16GiB, instead of those at hand; once for each GPU; 0 for none."),
]
RAM = Annotated[str | None, typer.Option("--ram", help="Plan for a machine with this much RAM, like 32GiB.")]
GPU = Annotated[
    list[str] | None,
    typer.Option("--gpu", metavar="NAME", help='Plan for this card, like "RTX 4070 Ti SUPER", instead of those at hand; once for each.'),
]
RAMBandwidth = Annotated[
    str | None, typer.Option("--ram-bandwidth", metavar="RATE", help="How fast the RAM is: DDR5-6000, DDR4-3200x4 (channels) or 89GB/s.")
]
Cores = Annotated[int | None, typer.Option("--cores", min=1, help="Plan for a processor with so many physical cores.")]
UBatch = Annotated[int | None, typer.Option("--ubatch", help="Tokens of a prompt that are read in one piece. [default: planned]")]
NDraft = Annotated[int, typer.Option("--draft", help="Tokens guessed ahead in each step, by the model's MTP block where it has one.")]
Checkpoints = Annotated[
    str | None,
    typer.Option("--checkpoints", metavar="SIZE", help="RAM for copies of recurrent states, from which chats go on. [default: planned]"),
]
KeepTexts = Annotated[
    str | None,
    typer.Option("--keep-texts", metavar="SIZE", help="RAM for chats whose slot other requests need meanwhile. [default: planned]"),
]
KVSplit = Annotated[
    bool, typer.Option("--kv-split", help="Each slot has its own share of the context: the same seed, the same answer, whatever else runs.")
]
Measure = Annotated[
    int | None,
    typer.Option("--measure", min=1, max=50, metavar="N", help="Load the N best placements in turn, keep the fastest, and remember it."),
]
NoDryRun = Annotated[bool, typer.Option("--no-dry-run", help="Do not try the plan on llama.cpp's own allocator.")]
MMProj = Annotated[Path | None, typer.Option("--mmproj", help="The mmproj .gguf file of the vision encoder that is loaded too.")]


def wishes_of(  # one argument a flag
    ctx: str | None,
    parallel: int,
    kv_type: str,
    n_gpu_layers: int | None,
    n_cpu_moe: int | None,
    margin: str,
    ubatch: int | None = None,
    draft: int = 0,
    checkpoints: str | None = None,
    kv_split: bool = False,
    ctx_per_slot: str | None = None,
    keep_texts: str | None = None,
) -> Wishes:
    """The flags as Wishes. Raises UsageError that names the flag."""
    from a3b_gguf.planner.plan import Wishes
    from a3b_gguf.units import parse_bytes, parse_tokens

    return Wishes(
        n_ctx=None if ctx is None else parse_tokens(ctx, "--ctx"),
        n_parallel=parallel,
        kv_type=kv_type,
        n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe,
        margin=parse_bytes(margin, "--margin"),
        n_ubatch=ubatch,
        n_draft=draft,
        checkpoint_bytes=None if checkpoints is None else parse_bytes(checkpoints, "--checkpoints"),
        text_bytes=None if keep_texts is None else parse_bytes(keep_texts, "--keep-texts"),
        kv_split=kv_split,
        n_ctx_slot=None if ctx_per_slot is None else parse_tokens(ctx_per_slot, "--ctx-per-slot"),
    )


def machine_of(
    vram: list[str] | None,
    ram: str | None,
    gpu: list[str] | None = None,
    ram_bandwidth: str | None = None,
    cores: int | None = None,
) -> Machine | None:
    """The machine that the flags describe, or None for the one at hand, which `flows.plan` then measures.

    What no flag describes is taken from the machine at hand; GPUs are looked for only when neither --vram nor --gpu is given.
    """
    if not (vram or gpu or ram or ram_bandwidth or cores):
        return None
    from dataclasses import replace

    from a3b_gguf import gpus, machine, probe
    from a3b_gguf.errors import UsageError
    from a3b_gguf.units import parse_bytes

    if vram and gpu:
        raise UsageError("--vram and --gpu both describe the GPUs", "give one of them; the card's memory is in gpus.toml")
    sizes = tuple(parse_bytes(size, "--vram") for size in vram or ())
    total = None if ram is None else parse_bytes(ram, "--ram")
    speed = None if ram_bandwidth is None else machine.ram_bandwidth(ram_bandwidth)
    cards = tuple(gpus.find(name) for name in gpu or ())
    found = probe.machine(gpus=not sizes and not cards, bandwidth=total is None and speed is None)
    if total is not None:
        found = machine.with_ram(found, total)
    if cards:
        found = machine.with_gpus(found, gpus.devices(cards, found.ram_total))
    elif sizes:
        found = machine.with_vram(found, sizes)
    return replace(found, described=True, ram_bandwidth=speed or found.ram_bandwidth, n_cores=cores or found.n_cores)
