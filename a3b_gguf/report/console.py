"""Prints values: text and tables for people, JSON for programs, errors in one shape."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from a3b_gguf.errors import A3BError

PIPE_WIDTH = 160  # columns of a table when nobody says how wide the screen is


def say(text: str = "") -> None:
    """One line, or several, to standard output."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """One line to standard error: what a person should know and a pipe should not carry."""
    sys.stderr.write(text + "\n")


def say_json(value: Any) -> None:
    """`value` as JSON: dataclasses become objects, paths and unknown things their text."""
    say(json.dumps(plain(value), ensure_ascii=False, indent=1))


def fail(error: A3BError) -> None:
    """The error and what to do about it, to standard error."""
    note(f"error: {error.message}" + (f"\n  what to do: {error.hint}" if error.hint else ""))


def plain(value: Any) -> Any:
    """Dataclasses, tuples and paths turned into what json can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def say_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> None:
    """A table; `numeric` lists the columns that are aligned to the right. Off a terminal nothing is folded."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    drawn = io.StringIO()
    Console(file=drawn, highlight=False, markup=False, color_system=None, width=width).print(table)
    lines = drawn.getvalue().splitlines()
    say("\n".join([title, *(line.rstrip() for line in lines), ""]))
