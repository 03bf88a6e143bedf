"""The flags that `a3b plan` and `a3b serve` share: what is wished, and which machine it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from a3b_gguf.machine import Machine
    from a3b_gguf.planner.plan import Wishes

Ctx = Annotated[str | None, typer.Option("--ctx", help="Tokens of context, like 64000 or 64k. [default: 32768, or all that the model has]")]
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


def wishes_of(  # one argument a flag
    ctx: str | None,
    parallel: int,
    kv_type: str,
    n_gpu_layers: int | None,
    n_cpu_moe: int | None,
    margin: str,
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
    )


def machine_of(vram: list[str] | None, ram: str | None) -> Machine | None:
    """The machine that the flags describe, or None for the one at hand, which `flows.plan` then measures.

    What no flag describes is taken from the machine at hand; GPUs are looked for only when no --vram is given.
    """
    if not vram and ram is None:
        return None
    from a3b_gguf import probe
    from a3b_gguf.machine import with_ram, with_vram
    from a3b_gguf.units import parse_bytes

    sizes = tuple(parse_bytes(size, "--vram") for size in vram or ())
    total = None if ram is None else parse_bytes(ram, "--ram")
    machine = with_vram(probe.machine(gpus=False), sizes) if vram else probe.machine()
    return machine if total is None else with_ram(machine, total)
