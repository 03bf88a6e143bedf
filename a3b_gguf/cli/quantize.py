"""`a3b quantize`: a checkpoint folder or a float GGUF becomes a quantized GGUF, in one pass."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    source: Path = typer.Argument(..., help="A checkpoint folder (config.json and safetensors) or a .gguf of f32, f16 or bf16 tensors."),
    type_name: str = typer.Option(..., "--type", help="A recipe (iq4_nl, q4_k_m) or a ggml type (q8_0, q6_k, ...) for every matrix."),
    output: Path | None = typer.Option(None, "-o", "--output", help="The file to write. Default: NAME-TYPE.gguf in the current folder."),
    stock: bool = typer.Option(
        False, "--stock", help="llama-quantize's own choice of types, and its names for --type (q5_k_m, iq4_xs, ...)."
    ),
    kernel: str | None = typer.Option(
        None, "--kernel", help="fast: ours, at most ggml's error. ggml: llama-quantize's bytes. Default: fast; ggml with --stock."
    ),
    threads: int | None = typer.Option(None, "--threads", help="Threads that encode. Default: all cores. The bytes do not depend on it."),
    no_mtp: bool = typer.Option(False, "--no-mtp", help="Leave the multi-token-prediction block out."),
    no_bounds: bool = typer.Option(False, "--no-bounds", help="Do not run the result to write clip_bounds.bin beside it."),
    max_shard_size: str | None = typer.Option(
        None, "--max-shard-size", help="Write NAME-00001-of-0000N.gguf files of at most this size: 4G is decimal, 4GiB binary."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the types and the exact size; write nothing."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Quantize a model and measure its activation ranges."""
    from a3b_gguf.flows.quantize import Options, plan_quantize, quantize_file
    from a3b_gguf.report import console, progress
    from a3b_gguf.report.quantize import show_quantized
    from a3b_gguf.units import parse_bytes

    shard_bytes = None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    options = Options(type_name, stock, kernel, threads, mtp=not no_mtp, bounds=not no_bounds, max_shard_bytes=shard_bytes)
    if dry_run:
        done = plan_quantize(source, output, options)
    else:
        with progress.shown("quantize", quiet=json) as tell:
            done = quantize_file(source, output, options, tell, say=console.note)
    if json:
        console.say_json(done)
    else:
        show_quantized(done)
