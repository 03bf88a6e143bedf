"""The tables of `a3b models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from a3b_gguf.catalog import ModelEntry
from a3b_gguf.report.console import say_table


def show_models(entries: Sequence[ModelEntry]) -> None:
    rows = [(e.name, e.architecture, number(e.parameters), number(e.active), number(e.n_ctx), ", ".join(e.aliases)) for e in entries]
    say_table("Models", ("name", "architecture", "B weights", "B active", "context", "aliases"), rows, numeric=(2, 3, 4))


def show_model(entry: ModelEntry) -> None:
    """Every fact of one model; what is not known has no row."""
    values = [(field.name, getattr(entry, field.name)) for field in fields(entry)]
    rows = [(name, ", ".join(value) if isinstance(value, tuple) else str(value)) for name, value in values if value not in (None, ())]
    say_table(entry.name, ("fact", "value"), rows)


def number(value: float | None) -> str:
    """Nothing for what is not known."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"
