"""Progress of long work: a bar with bytes, rate and time left on a terminal, else one line for each 10 %."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
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


class _Lines:
    """Remembers the last tenth that was printed."""

    def __init__(self, what: str) -> None:
        self.what, self.tenth, self.started = what, 0, time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > self.tenth:
            self.tenth = tenth
            seconds = max(time.monotonic() - self.started, 1e-3)
            left = seconds * (total - done) / max(done, 1)
            sys.stderr.write(f"{self.what}: {10 * tenth} %, {human_bytes(done)}, {human_bytes(done / seconds)}/s, {left:.0f} s left\n")
