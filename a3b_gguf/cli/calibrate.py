"""`a3b calibrate`: what matters in a model, measured: an importance matrix and activation ranges."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    model: Path = typer.Argument(..., help="A .gguf of the model, in any type: the finest that fits into the RAM is best."),
    data: list[str] = typer.Option(
        [], "--data", help="A text file, or .jsonl with messages; `builtin` is our own text. May be repeated. Default: builtin."
    ),
    output: Path | None = typer.Option(None, "-o", "--output", help="The folder to write into. Default: NAME-calibration."),
    chunks: int | None = typer.Option(None, "--chunks", help="Decode at most so many chunks. Default: all of the text."),
    ctx: int = typer.Option(512, "--ctx", help="Tokens in a chunk, each chunk read on its own."),
    enough: int = typer.Option(256, "--enough", help="Stop when every expert has seen so many tokens; 0: read all of the text."),
    output_tensor: bool = typer.Option(False, "--output-tensor", help="Also collect for the output matrix."),
    winsorize: bool = typer.Option(False, "--winsorize", help="Also write imatrix-winsorized.gguf: outliers are capped first."),
    merge: list[Path] = typer.Option([], "--merge", help="Run nothing; add up the folders that earlier runs wrote. Repeat for each."),
    threads: int | None = typer.Option(None, "--threads", help="Threads that compute. Default: by cores and size of the model."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Run a model over text and write imatrix.gguf, clip_bounds.bin and histograms.npz. An interrupted run is continued by the next."""
    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.calibrate import Options, calibrate_file, default_folder
    from a3b_gguf.flows.calibration_merge import merge_folders
    from a3b_gguf.report import console, progress
    from a3b_gguf.report.calibrate import show_calibrated

    options = Options(tuple(data), ctx, chunks, output_tensor, winsorize, enough, threads)
    if merge:
        if options != Options():
            raise UsageError("--merge runs nothing: it takes -o and --json, no other option has a meaning", "leave the others out")
        done = merge_folders(model, merge, output or default_folder(model))
    else:
        with progress.counted("calibrate", "tokens", quiet=json) as tell:
            done = calibrate_file(model, output, options, lambda now, total, text: tell(now, total))
    if json:
        console.say_json(done)
    else:
        show_calibrated(done)
