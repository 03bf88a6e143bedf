"""`a3b doctor`: what this machine has."""

from __future__ import annotations

import typer


def command(json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Show what this machine has for a model: GPUs and who holds their memory, RAM and its bandwidth, cores, limits, traps."""
    from a3b_gguf import probe
    from a3b_gguf.probe.survey import survey
    from a3b_gguf.report.console import say_json
    from a3b_gguf.report.doctor import show_survey

    found = survey(probe.machine())
    if json:
        say_json(found)
    else:
        show_survey(found)
