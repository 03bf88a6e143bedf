"""`a3b inspect`: what a model file holds, without loading it."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    file: Path = typer.Argument(..., help="A .gguf file, or a clip_bounds.bin."),
    tensors: bool = typer.Option(False, "--tensors", help="List every tensor; of a clip_bounds.bin, every record."),
    diff: Path | None = typer.Option(None, "--diff", help="Another .gguf file: show what the two do not share; exit 1 when they differ."),
    card: bool = typer.Option(
        False, "--card", help="Print what `a3b eval --embed` left in the file as Markdown, for a model card; exit 1 when there is nothing."
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show a file's header, tensors and sizes by role. Reads the header only: an 18 GiB file takes a tenth of a second."""
    from a3b_gguf.errors import UsageError
    from a3b_gguf.flows.clip_bounds import is_bounds, summarise_bounds
    from a3b_gguf.flows.inspect import differences, summarise
    from a3b_gguf.report import console
    from a3b_gguf.report.inspect import show_differences, show_summary

    if card and (json or tensors or diff is not None):
        raise UsageError("--card prints Markdown and nothing else; --json, --tensors and --diff are of the header", "leave one of them out")
    if card:
        from a3b_gguf.flows.card import card as card_of

        console.say(card_of(file))
        return
    if diff is None and is_bounds(file):
        from a3b_gguf.report.clip_bounds import show_bounds

        found_bounds = summarise_bounds(file)
        if json:
            console.say_json(found_bounds)
        else:
            show_bounds(found_bounds, tensors)
        return
    if diff is not None:
        found = differences(file, diff)
        if json:
            console.say_json(found)
        else:
            show_differences(file, diff, found)
        raise typer.Exit(1 if found else 0)
    summary = summarise(file)
    if json:
        console.say_json(summary)
    else:
        show_summary(summary, tensors)
