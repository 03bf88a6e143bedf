"""Prints values: text and tables for people, JSON for programs, errors in one shape."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from a3b_gguf.errors import A3BError, MachineLacks

PIPE_WIDTH = 160  # columns of a table when nobody says how wide the screen is


class _Outlet(io.FileIO):
    """Standard output or error. What nobody can take goes nowhere from then on: a reader who has seen enough, as `head`, is no failure
    and changes no exit code. forgives: the errors that mean so."""

    def __init__(self, number: int, forgives: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._forgives = forgives

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._forgives:
            _forget(self.fileno())
            return len(data)


def prepare() -> None:
    """Makes standard streams that can take whatever is written to them, also by what is not ours, as the help.

    A stream that was closed becomes /dev/null, or the next file that is opened would get its number and what llama.cpp prints. What
    the terminal's encoding lacks is written as an escape: a path may hold bytes that are no text at all.
    """
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            flags, mode = (os.O_RDONLY, "r") if number == 0 else (os.O_WRONLY, "w")
            os.dup2(os.open(os.devnull, flags), number)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = _forgiving(sys.stdout, 1, BrokenPipeError)
    sys.stderr = _forgiving(sys.stderr, 2, OSError)  # there is nowhere left to tell it


def _forgiving(stream: TextIO, number: int, forgives: type[OSError]) -> TextIO:
    """`stream` through an _Outlet, when it is the process's own and not one that captures."""
    kinds = (io.BufferedWriter, io.FileIO)  # the latter under PYTHONUNBUFFERED
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(stream.buffer, kinds) or stream.fileno() != number:
        return stream
    stream.flush()
    raw = _Outlet(number, forgives)
    buffer = io.BufferedWriter(raw) if isinstance(stream.buffer, io.BufferedWriter) else raw
    return io.TextIOWrapper(
        buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def _forget(number: int) -> None:
    """What is written to the descriptor from now on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


@contextmanager
def _to_stdout() -> Iterator[None]:
    """A disk that is full is a failure."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):  # what is still held would fail once more at the end
            _forget(sys.stdout.fileno())
        raise MachineLacks(f"standard output: {error.strerror}", "free some space, or write elsewhere") from error


def write(text: str) -> None:
    """`text` as it is to standard output. Raises MachineLacks when that cannot be written."""
    with _to_stdout():
        sys.stdout.write(text)


def flush() -> None:
    """Sends off what was written so far. Raises as `write`."""
    with _to_stdout():
        sys.stdout.flush()


def say(text: str = "") -> None:
    """One line, or several, to standard output."""
    write(text + "\n")


def note(text: str) -> None:
    """One line to standard error: what a person should know and a pipe should not carry. Where nobody can read it, it is lost."""
    sys.stderr.write(text + "\n")


def _has_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def say_json(value: Any) -> None:
    """`value` as JSON: dataclasses become objects, paths and unknown things their text."""
    say(json.dumps(plain(value), ensure_ascii=not _has_unicode(), indent=1))


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
    text = drawn.getvalue() if _has_unicode() else drawn.getvalue().replace("─", "-")
    lines = text.splitlines()
    say("\n".join([title, *(line.rstrip() for line in lines), ""]))
