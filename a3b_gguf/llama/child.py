"""Questions to llama.cpp that are asked in a process of their own: it may end it, and what it allocated is gone with it.

A module that answers has a `main` that calls `answer`; the other side calls `ask`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from a3b_gguf.errors import A3BError, BadInput, MachineLacks
from a3b_gguf.llama.params import LoadParams, params_of


def ask(module: str, path: Path, load: LoadParams, timeout_seconds: float, hint: str) -> dict[str, Any]:
    """What `python -m MODULE PATH` answers to `load`. Raises what loading raises, and MachineLacks with `hint` when the child ends without
    an answer."""
    command = [sys.executable, "-m", module, str(path)]
    # Without the variable a failed assertion of llama.cpp starts a debugger, which takes seconds.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    given = json.dumps(asdict(load))
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise MachineLacks(f"trying {path} did not end within {timeout_seconds:g} s", hint) from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "GGML_ASSERT" in line), done.stderr.strip()[-300:])
        raise MachineLacks(f"llama.cpp ended while {path} was tried ({done.returncode}): {said}", hint)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in told:
        kind = BadInput if told["exit_code"] == BadInput.exit_code else MachineLacks
        raise kind(told["error"], told["hint"])
    return told


def answer(work: Callable[[Path, LoadParams], dict[str, Any]]) -> None:
    """The child's side: parameters from standard input, one line of JSON on standard output."""
    try:
        told = work(Path(sys.argv[1]), params_of(json.load(sys.stdin)))
    except A3BError as error:
        told = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
    sys.stdout.write(json.dumps(told) + "\n")
