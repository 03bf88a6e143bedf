"""`a3b serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from a3b_gguf.cli.wishes import RAM, VRAM, CPUMoE, Ctx, GPULayers, KVType, Margin, Parallel, machine_of, wishes_of

if TYPE_CHECKING:
    from a3b_server.messages import Facts


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
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; the default is reachable from this machine only."),
    port: int = typer.Option(8080, "--port", help="Port to listen on; 0 takes any that is free."),
    api_key: list[str] = typer.Option([], "--api-key", metavar="KEY", help="Answer only requests with this key; may be repeated."),
    system: Literal["optional", "required"] = typer.Option("optional", "--system", help="Whether a request must have a system message."),
    thinking: Literal["on", "off", "auto"] = typer.Option(
        "auto", "--thinking", help="Whether the model thinks when a request does not say; auto is the template's way."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the plan and stop."),
    json: bool = typer.Option(False, "--json", help="With --dry-run: print the plan as JSON."),
) -> None:
    """Plan how to load a model, load it, and serve /v1/chat/completions, /v1/models and /health until interrupted."""
    import sys

    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.serve import Told, plan_here, serve_plan
    from a3b_gguf.report.console import say, say_json
    from a3b_gguf.report.plan import as_json, show_plan
    from a3b_gguf.report.serve import show_loaded
    from a3b_server.service import Options

    if json and not dry_run:
        raise UsageError("--json prints a plan and is for --dry-run", "add --dry-run, or ask the server itself: GET /health and /v1/models")
    options = Options(system, thinking, tuple(api_key))
    plan = plan_here(model, wishes_of(ctx, parallel, kv_type, n_gpu_layers, n_cpu_moe, margin), machine_of(vram, ram))
    if json:
        say_json(as_json(plan))
    else:
        show_plan(plan)
    if dry_run:
        return
    url = ""

    def listening(address: str) -> None:
        nonlocal url
        url = address
        say(f"loading {model}; {url}/health tells when it is ready")
        sys.stdout.flush()

    def ready(facts: Facts) -> None:
        show_loaded(plan, facts)
        say(f"ready after {facts.load_seconds:.1f} s: {url}/v1 ({facts.n_seq_max} at a time, {facts.n_ctx:,} tokens)")
        sys.stdout.flush()

    serve_plan(plan, host, port, options, Told(listening, ready))
