"""Runs `a3b` in this process: what it would print and how it would end, without a third of a second for starting an interpreter."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from a3b_gguf.cli import main


def inside(*words: object, given: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As command.a3b. For commands that start no process of their own and change nothing in this one."""
    stdin = io.TextIOWrapper(io.BytesIO((given or "").encode()), encoding="utf-8", newline="")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    argv = ["a3b", *map(str, words)]
    code = 0
    before = Path.cwd()
    with ExitStack() as stack:
        for name, value in (("argv", argv), ("stdin", stdin), ("stdout", out), ("stderr", err)):
            stack.enter_context(mock.patch.object(sys, name, value))
        stack.enter_context(mock.patch.dict(os.environ))
        try:
            os.chdir(cwd or before)
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            os.chdir(before)
        texts = []
        for stream in (out, err):
            stream.flush()
            assert isinstance(stream.buffer, io.BytesIO)
            texts.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(argv, code, texts[0], texts[1])
