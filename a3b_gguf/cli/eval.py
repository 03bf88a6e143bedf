"""`a3b eval`: how good a model file is, in numbers that can be compared with any other file's."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    model: Path = typer.Argument(..., help="The .gguf to evaluate."),
    base: Path | None = typer.Option(None, "--base", help="A .gguf of the same model to compare with, bf16 best: gives the KL divergence."),
    data: Path | None = typer.Option(
        None, "--data", help="Text to evaluate on: UTF-8, or .jsonl of texts and conversations. Default: a built-in text."
    ),
    parse_special: bool = typer.Option(
        False, "--parse-special", help="Control tokens in --data, like <|im_start|>, are tokens and not letters: for rendered chats."
    ),
    ctx: str = typer.Option("512", "--ctx", help="Tokens of a chunk; the second half of each is scored."),
    chunks: int | None = typer.Option(None, "--chunks", help="Take this many chunks. Default: the whole text."),
    kv_type: str = typer.Option("f16", "--kv-type", help="KV cache of the model, like q8_0, or two as K/V. The base always has f16."),
    experts: int = typer.Option(0, "--experts", help="Experts used for a token, instead of the file's own number. The base keeps its own."),
    gpu_layers: int | None = typer.Option(None, "--n-gpu-layers", help="Layers on the GPUs. Default: all, where there is a GPU."),
    cpu_moe: int = typer.Option(0, "--n-cpu-moe", help="Layers whose routed experts stay in RAM."),
    threads: int | None = typer.Option(None, "--threads", help="Threads. Default: all cores."),
    cache: Path | None = typer.Option(
        None, "--cache", help="Folder that keeps what bases said, so that a base runs once. Default: a3b/eval in the user's cache folder."
    ),
    no_cache: bool = typer.Option(False, "--no-cache", help="Keep nothing."),
    cache_limit: str = typer.Option("8GiB", "--cache-limit", help="What the cache folder may hold; the least recently used goes first."),
    embed: Path | None = typer.Option(
        None, "--embed", help="Also write a copy of the model to this file that carries the results: `a3b inspect FILE --card` prints them."
    ),
    report: Path | None = typer.Option(None, "--report", help="With --embed: also what `a3b quantize --report` wrote about this model."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure perplexity and, against a base, KL divergence and same top-1: the numbers of llama-perplexity on the same text."""
    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.card import embed_evaluation, refuse_embed
    from a3b_gguf.flows.card_report import report_metadata
    from a3b_gguf.flows.evaluate import EvalOptions, default_cache, evaluate_file
    from a3b_gguf.report import console, progress
    from a3b_gguf.report.eval import show_evaluation
    from a3b_gguf.units import parse_bytes, parse_tokens

    if no_cache and cache:
        raise UsageError("--cache and --no-cache exclude each other", "leave one out")
    if experts < 0 or cpu_moe < 0:
        raise UsageError("--experts and --n-cpu-moe cannot be negative", "leave them out")
    options = EvalOptions(
        base=base,
        data=data,
        parse_special=parse_special,
        n_ctx=parse_tokens(ctx),
        n_chunk=chunks,
        kv_type=kv_type,
        n_expert_used=experts,
        n_gpu_layers=gpu_layers,
        n_cpu_moe=cpu_moe,
        threads=threads,
        cache=None if no_cache else cache or default_cache(),
        cache_bytes=parse_bytes(cache_limit, "--cache-limit"),
    )
    if report and embed is None:
        raise UsageError("--report goes into the file that --embed writes", "add --embed FILE")
    about = report_metadata(report, model) if report else {}
    if embed is not None:
        refuse_embed(model, embed)
    found = evaluate_file(model, options, lambda what: progress.counted(f"eval {what}", "chunks", quiet=json))
    if json:
        console.say_json(found)
    else:
        show_evaluation(found)
    if embed is not None:
        with progress.shown("embed", quiet=json) as tell:
            embed_evaluation(model, embed, found, about, tell)
        console.note(f"wrote {embed}: the same tensors, with these results in its metadata")
