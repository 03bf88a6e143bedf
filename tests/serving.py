"""A real `a3b serve` in a process of its own, for as long as a test needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

HANGS_SECONDS = 60  # what a test takes at most with its server


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "a3b_gguf", "serve", *map(str, args)]


class Served:
    """A running `a3b serve`, its lines until it was ready, and its base URL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)
            if line.startswith("ready after"):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.url = self.lines[-1].split(" s: ")[1].split(" ")[0]

    @property
    def family(self) -> list[psutil.Process]:
        """The engine's process and whatever else was started."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def end(self, sort: signal.Signals) -> int:
        self.process.send_signal(sort)
        return self.process.wait(HANGS_SECONDS)


@contextmanager
def serving(*args: str | Path, patience: float = HANGS_SECONDS, errors: IO[bytes] | None = None) -> Iterator[Served]:
    """patience: seconds after which the process is killed, so that a bug cannot hang the suite. errors: takes its standard error."""
    # Other work on the machine makes threads that spin while they wait for each other slower by orders of magnitude.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    words = command(*args, "--port", "0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment) as process:
        watchdog = threading.Timer(patience, process.kill)
        watchdog.start()
        try:
            yield Served(process)
        finally:
            watchdog.cancel()
            process.kill()
