"""`a3b models`: the models that a3b knows by name."""

from __future__ import annotations

import typer


def command(
    what: str = typer.Argument("list", help="list, or show."),
    name: str | None = typer.Argument(None, help="With show: a name or an alias."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the models that a3b knows by name, or show one: where it comes from and its dimensions."""
    from a3b_gguf import catalog
    from a3b_gguf.errors import UsageError
    from a3b_gguf.report.console import say_json
    from a3b_gguf.report.models import show_model, show_models

    if what == "list" and name is None:
        found = catalog.entries()
        if json:
            say_json(found)
        else:
            show_models(found)
    elif what == "show" and name is not None:
        entry = catalog.get(name)
        if json:
            say_json(entry)
        else:
            show_model(entry)
    else:
        raise UsageError(f"a3b models {what} {name or ''}".rstrip() + " is not a command", "a3b models list, or a3b models show NAME")
