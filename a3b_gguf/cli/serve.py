"""`a3b serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from a3b_gguf.cli.wishes import (
    GPU,
    RAM,
    VRAM,
    Checkpoints,
    CPUMoE,
    Ctx,
    CtxPerSlot,
    GPULayers,
    KeepTexts,
    KVSplit,
    KVType,
    Margin,
    Measure,
    NDraft,
    NoDryRun,
    Parallel,
    UBatch,
    machine_of,
    wishes_of,
)  # fmt: skip

if TYPE_CHECKING:
    from a3b_server.messages import Facts


def command(
    model: Path = typer.Argument(..., help="A .gguf file; of a split model the first part."),
    ctx: Ctx = None,
    vram: VRAM = None,
    gpu: GPU = None,
    ram: RAM = None,
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
    margin: Margin = "1GiB",
    measure: Measure = None,
    no_dry_run: NoDryRun = False,
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; the default is reachable from this machine only."),
    port: int = typer.Option(8080, "--port", min=0, max=65535, help="Port to listen on; 0 takes any that is free."),
    api_key: list[str] = typer.Option([], "--api-key", metavar="KEY", help="Answer only requests with this key; may be repeated."),
    system: Literal["optional", "required"] = typer.Option("optional", "--system", help="Whether a request must have a system message."),
    thinking: Literal["on", "off", "auto"] = typer.Option(
        "auto", "--thinking", help="Whether the model thinks when a request does not say; auto is the template's way."
    ),
    thinking_budget: int | None = typer.Option(
        None, "--thinking-budget", min=1, metavar="N", help="Tokens of reasoning after which the answer must begin; none: no limit."
    ),
    strict: bool = typer.Option(False, "--strict", help="Refuse requests by warnings too, not only by errors."),
    unknown_fields: Literal["refuse", "warn"] = typer.Option(
        "refuse", "--unknown-fields", help="Fields of a request that are not known: a 400, or left out and named in a header."
    ),
    map_developer: bool = typer.Option(False, "--map-developer", help="Take developer messages for the system message."),
    control_text: Literal["refuse", "as-text"] = typer.Option(
        "refuse", "--control-text", help="Texts of control tokens in messages: a 400, or tokenized as the letters they are."
    ),
    queue: int = typer.Option(64, "--queue", min=0, metavar="N", help="Requests that may wait for a slot; others get a 503."),
    cors: list[str] = typer.Option(
        [], "--cors", metavar="ORIGIN", help="Web pages of this origin (https://HOST[:PORT]) may ask; may be repeated; * for all."
    ),
    clip_bounds: Path | None = typer.Option(None, "--clip-bounds", metavar="FILE", help="Measured activation ranges of this model."),
    clip: Literal["watch", "enforce"] | None = typer.Option(
        None, "--clip", help="With --clip-bounds: count values beyond them now and then, or clamp every one (slow, changes answers)."
    ),
    states: Path | None = typer.Option(
        None, "--states", metavar="DIR", help="Keep texts of chats here, so that they are not read again after a restart. [default: not]"
    ),
    states_limit: str = typer.Option("4GiB", "--states-limit", metavar="SIZE", help="What --states may take; the oldest give way."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the plan and stop."),
    json: bool = typer.Option(False, "--json", help="With --dry-run: print the plan as JSON."),
) -> None:
    """Plan how to load a model, load it, and serve /v1/chat/completions, /v1/completions, /v1/embeddings and more until interrupted."""
    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.clipping import clip_config
    from a3b_gguf.flows.plan import read_facts
    from a3b_gguf.flows.plan_here import Means, choose_plan
    from a3b_gguf.flows.serve import Door, Told, open_entrance, serve_plan, states_config
    from a3b_gguf.report.console import flush, say, say_json
    from a3b_gguf.report.plan import as_json, show_plan
    from a3b_gguf.report.progress import counted
    from a3b_gguf.report.serve import show_choice, show_dry_run, show_loaded
    from a3b_server.access import api_key as checked_key
    from a3b_server.access import origin
    from a3b_server.service import Options

    if json and not dry_run:
        raise UsageError("--json prints a plan and is for --dry-run", "add --dry-run, or ask the server itself: GET /health and /v1/models")
    options = Options(
        system,
        thinking,
        tuple(map(checked_key, api_key)),
        thinking_budget,
        mode="strict" if strict else "lenient",
        unknown=unknown_fields,
        developer="system" if map_developer else "refuse",
        controls=control_text,
    )
    origins, clipping = tuple(map(origin, cors)), clip_config(model, clip_bounds, clip)
    if states and keep_texts is not None:
        raise UsageError("--states and --keep-texts both say where texts go that lose their slot: to a disk, or to RAM", "give one of them")
    texts = "0" if states else keep_texts
    wishes = wishes_of(ctx, parallel, kv_type, n_gpu_layers, n_cpu_moe, margin, ubatch, draft, checkpoints, kv_split, ctx_per_slot, texts)
    machine = machine_of(vram, ram, gpu)
    with nullcontext() if dry_run else open_entrance(model, host, port) as entrance:
        kept = None if dry_run else states_config(states, states_limit)
        facts = entrance.facts if entrance else read_facts(model)
        with counted("measuring", "placements", quiet=json or not measure) as tell:
            chosen = choose_plan(facts, wishes, machine, Means(not no_dry_run, measure or 0), tell)
        plan = chosen.plan
        if json:
            say_json(as_json(plan))
        else:
            show_plan(plan)
            show_dry_run(chosen.checked)
            if chosen.choice:
                show_choice(chosen.choice)
        if entrance is None:
            return
        url = ""

        def listening(address: str) -> None:
            nonlocal url
            url = address
            say(f"loading {model}; {url}/health tells when it is ready")
            flush()

        def ready(loaded: Facts) -> None:
            show_loaded(plan, loaded)
            say(f"ready after {loaded.load_seconds:.1f} s: {url}/v1 ({loaded.n_seq_max} at a time, {loaded.n_ctx:,} tokens)")
            flush()

        door = Door(origins, queue, clipping, kept)
        serve_plan(plan, as_json(plan), door, options, Told(listening, ready), entrance)
