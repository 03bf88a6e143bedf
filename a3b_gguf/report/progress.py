"""Progress of long work: a bar with bytes, rate and time left on a terminal, else one line for each 10 %."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from a3b_gguf.gguf_write import Progress
from a3b_gguf.units import human_bytes


@contextmanager
def shown(what: str, quiet: bool = False) -> Iterator[Progress]:
    """Yields a function that is told (bytes done, bytes in all, name). Everything goes to standard error."""
    if quiet:
        yield lambda done, total, name: None
    elif sys.stderr.isatty():
        yield from _bar(what)
    else:
        yield _Lines(what)


def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    times = TransferSpeedColumn(), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), *times, TextColumn("{task.fields[name]}"))
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, name="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, name=name)


@contextmanager
def counted(what: str, unit: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """As `shown`, for things that are counted: yields a function that is told (done, in all)."""
    if quiet:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        yield from _count_bar(what, unit)
    else:
        lines = _Lines(what, lambda done, seconds: f"{done:,} {unit}")
        yield lambda done, total: lines(done, total, "")


def _count_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn()
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bytes_and_rate(done: int, seconds: float) -> str:
    return f"{human_bytes(done)}, {human_bytes(done / seconds)}/s"


class _Lines:
    """Remembers the last tenth that was printed."""

    def __init__(self, what: str, amount: Callable[[int, float], str] = _bytes_and_rate) -> None:
        self.what, self.amount, self.tenth, self.started = what, amount, 0, time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth < self.tenth:  # the next stage of the work begins
            self.tenth, self.started = 0, time.monotonic()
        if tenth > self.tenth:
            self.tenth = tenth
            seconds = max(time.monotonic() - self.started, 1e-3)
            left = seconds * (total - done) / max(done, 1)
            at = f", {name}" if name else ""
            sys.stderr.write(f"{self.what}: {10 * tenth} %, {self.amount(done, seconds)}, {left:.0f} s left{at}\n")
