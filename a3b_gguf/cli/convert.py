"""`a3b convert`: a checkpoint folder as a GGUF file that loses nothing."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    src: Path = typer.Argument(..., help="Checkpoint folder: config.json, tokenizer.json and safetensors."),
    output: Path | None = typer.Option(None, "--output", "-o", help="File to write. Default: FOLDER-TYPE.gguf in the current folder."),
    float_type: str = typer.Option(
        "auto", "--type", help="auto keeps each tensor's own type, FP8 becomes bf16; bf16, f16, f32 and q8_0 cast."
    ),
    no_mtp: bool = typer.Option(False, "--no-mtp", help="Leave the multi-token-prediction block out."),
    mtp_only: bool = typer.Option(
        False, "--mtp-only", help="Write the multi-token-prediction block alone, as a draft model: mtp-FOLDER-TYPE.gguf."
    ),
    chat_template: Path | None = typer.Option(None, "--chat-template", help="Jinja file that replaces the checkpoint's chat template."),
    max_shard_size: str | None = typer.Option(
        None, "--max-shard-size", help="Write NAME-00001-of-0000N.gguf files of at most this size: 4G is decimal, 4GiB binary."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show every tensor and the exact size of the file; write nothing."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Convert a checkpoint's safetensors to one GGUF file. Reads and writes a few MiB at a time."""
    from a3b_convert import Mtp, convert, prepare
    from a3b_gguf.errors import UsageError
    from a3b_gguf.report import console
    from a3b_gguf.report.convert import show_conversion, show_converted
    from a3b_gguf.report.progress import shown
    from a3b_gguf.units import parse_bytes

    if no_mtp and mtp_only:
        raise UsageError("--mtp-only and --no-mtp together leave nothing to write", "give one of them")
    mtp: Mtp = "only" if mtp_only else not no_mtp
    shard_bytes = None if max_shard_size is None else parse_bytes(max_shard_size, "--max-shard-size")
    if dry_run:
        facts = prepare(
            src,
            output,
            float_type=float_type,
            mtp=mtp,
            chat_template=chat_template,
            max_shard_bytes=shard_bytes,
        )
        if json:
            console.say_json(facts)
        else:
            show_conversion(facts)
        return
    with shown("convert", quiet=json) as progress:
        done = convert(
            src,
            output,
            float_type=float_type,
            mtp=mtp,
            chat_template=chat_template,
            max_shard_bytes=shard_bytes,
            progress=progress,
        )
    if json:
        console.say_json(done)
    else:
        show_converted(done)
