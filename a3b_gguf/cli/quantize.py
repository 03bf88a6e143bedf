"""`a3b quantize`: a checkpoint folder or a float GGUF becomes a quantized GGUF, in one pass."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    source: Path = typer.Argument(..., help="A checkpoint folder (config.json and safetensors) or a .gguf of f32, f16 or bf16 tensors."),
    type_name: str | None = typer.Option(
        None, "--type", help="A recipe (iq4_nl, q4_k_m, ...), a ggml type (q4_0, f16, ...) for every matrix, or copy."
    ),
    output: Path | None = typer.Option(None, "-o", "--output", help="The file to write. Default: NAME-TYPE.gguf in the current folder."),
    stock: bool = typer.Option(
        False, "--stock", help="llama-quantize's own choice of types, and its names for --type (q5_k_s, iq3_m, ...)."
    ),
    pure: bool = typer.Option(False, "--pure", help="--type is a ggml type for every matrix, not a recipe."),
    policy: str | None = typer.Option(
        None, "--policy", help="A TOML file of rules, or a shipped one (write-up). --type decides where it does not."
    ),
    tensor_type: list[str] = typer.Option(
        [],
        "--tensor-type",
        metavar="REGEX=TYPE",
        help="The type of tensors whose name has a match of REGEX; case counts, ^ and $ are the name's ends. The first that matches wins.",
    ),
    group_size: list[str] = typer.Option(
        [], "--group-size", metavar="ROLE=N", help="64 or 128 iq4_nl weights share a scale: same size, more error."
    ),
    target_size: str | None = typer.Option(
        None, "--target-size", help="Choose a type for each tensor so that the file is at most this large, like 16GiB."
    ),
    target_bpw: float | None = typer.Option(None, "--target-bpw", help="The same, for so many bits a weight on average, like 4.3."),
    sensitivity: str = typer.Option(
        "auto",
        "--sensitivity",
        help="For the targets: measure (on the model itself, in memory), estimate (from --calibration), table, or auto: by size.",
    ),
    sensitivity_data: list[str] = typer.Option(
        [], "--sensitivity-data", metavar="FILE", help="Text to measure on, .txt or .jsonl. Default: that of a3b calibrate."
    ),
    candidates: str | None = typer.Option(None, "--candidates", help="Types to choose from, like q3_k,iq4_xs,q6_k."),
    imatrix: Path | None = typer.Option(None, "--imatrix", help="An imatrix.gguf or imatrix.dat."),
    calibration: Path | None = typer.Option(
        None, "--calibration", metavar="DIR", help="What `a3b calibrate` wrote: importance and ranges."
    ),
    effort: int | None = typer.Option(None, "--effort", help="1, 2 or 3: how long to look for a smaller error."),
    kernel: str | None = typer.Option(
        None, "--kernel", help="fast: ours, at most ggml's error. ggml: llama-quantize's bytes. Default: fast; ggml with --stock."
    ),
    threads: int | None = typer.Option(None, "--threads", help="Threads that encode. Default: all cores. The bytes do not depend on it."),
    no_mtp: bool = typer.Option(False, "--no-mtp", help="Leave the multi-token-prediction block out."),
    set_kv: list[str] = typer.Option(
        [],
        "--set-kv",
        metavar="KEY=VALUE",
        help="Set a metadata key. It keeps its type; a new one takes KEY=TYPE:VALUE. @FILE as value reads a text file.",
    ),
    experts: int | None = typer.Option(None, "--experts", help="How many experts a token uses."),
    prune_experts: Path | None = typer.Option(
        None, "--prune-experts", metavar="FILE", help="Leave experts out: a TOML table of layers and experts."
    ),
    prune_layers: str | None = typer.Option(None, "--prune-layers", hidden=True),
    allow_requantize: bool = typer.Option(False, "--allow-requantize", help="Take a source that is quantized already; errors add up."),
    max_shard_size: str | None = typer.Option(
        None, "--max-shard-size", help="Write NAME-00001-of-0000N.gguf files of at most this size: 4G is decimal, 4GiB binary."
    ),
    report: Path | None = typer.Option(None, "--report", metavar="FILE", help="Measure what each tensor lost; JSON, and a table."),
    no_bounds: bool = typer.Option(False, "--no-bounds", help="Do not run the result to write clip_bounds.bin beside it."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the types and the exact size; write nothing."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Quantize a model and measure its activation ranges."""
    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.allocate import Target
    from a3b_gguf.flows.quantize import plan_quantize, quantize_file
    from a3b_gguf.flows.quantize_options import Options, refuse_layers
    from a3b_gguf.flows.quantize_target import plan_to_target, quantize_to_target
    from a3b_gguf.report import console, progress
    from a3b_gguf.report.quantize import show_quantized
    from a3b_gguf.units import parse_bytes
    from a3b_quantize.allocate import CANDIDATES

    refuse_layers(prune_layers)
    options = Options(
        type_name,
        stock=stock,
        kernel=kernel,
        threads=threads,
        mtp=not no_mtp,
        bounds=not no_bounds,
        max_shard_bytes=None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size"),
        pure=pure,
        policy=policy,
        tensor_types=tuple(tensor_type),
        group_sizes=tuple(group_size),
        imatrix=imatrix,
        calibration=calibration,
        effort=effort,
        experts=experts,
        prune=prune_experts,
        set_kv=tuple(set_kv),
        allow_requantize=allow_requantize,
        report=report,
    )
    target = None
    if target_size is not None or target_bpw is not None:
        size = None if target_size is None else parse_bytes(target_size, "--target-size")
        names = CANDIDATES if candidates is None else tuple(name.strip() for name in candidates.lower().split(","))
        target = Target(size, target_bpw, sensitivity, names, tuple(sensitivity_data))
    elif sensitivity != "auto" or sensitivity_data or candidates is not None:
        raise UsageError("--sensitivity, --sensitivity-data and --candidates are for a target", "add --target-size or --target-bpw")
    say = None if json else console.note
    if dry_run and target:
        done = plan_to_target(source, output, options, target, say)
    elif dry_run:
        done = plan_quantize(source, output, options)
    elif target:
        done = quantize_to_target(source, output, options, target, lambda: progress.shown("quantize", quiet=json), say=say)
    else:
        with progress.shown("quantize", quiet=json) as tell:
            done = quantize_file(source, output, options, tell, say=console.note)
    if json:
        console.say_json(done)
    else:
        show_quantized(done)
