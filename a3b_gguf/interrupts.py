"""Ctrl-C and processes of ours: a terminal sends it to all of them, and only the one that the user started should answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started meanwhile never hear SIGINT, not even while they import: the mask of signals is inherited.

    Whoever starts them has to end them. This process hears it afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
