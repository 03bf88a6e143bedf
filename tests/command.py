"""Runs `a3b` as a user does: a process of its own, its exit code, what it printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

A3B = str(Path(sys.executable).parent / "a3b")


def a3b(*words: object, given: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`a3b words...` with `given` on standard input."""
    command = [A3B, *map(str, words)]
    stdin = subprocess.DEVNULL if given is None else None
    return subprocess.run(command, input=given, stdin=stdin, capture_output=True, text=True, cwd=cwd, timeout=120)


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """Asserts one clear refusal: the exit code, each of `said` in the message, and no traceback."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr, done.stderr
