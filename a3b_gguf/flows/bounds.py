"""Measures activation ranges of a model that was just written, in a child process: llama.cpp may end its process, ours goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from a3b_gguf.clip_bounds import FILE_NAME, read_bounds
from a3b_gguf.errors import A3BError
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.model_id import model_id
from a3b_gguf.split import read_parts
from a3b_gguf.units import MIB, human_bytes
from a3b_quantize.bounds import beside, check_model
from a3b_quantize.measure import MAX_TOKENS

CHILD = (sys.executable, "-m", "a3b_quantize.measure")
MARGIN = 512 * MIB  # context, activations and histograms of the run, generously
BYTES_PER_THREAD = 256 * MIB  # the graph stops at every measured node: more threads than work only wait for each other


@dataclass(frozen=True, slots=True)
class Measured:
    """path: the bounds that were written, or None; notes: why not, and what else the user should know."""

    path: Path | None
    notes: tuple[str, ...]


def measure_bounds(
    model: Path, child: Sequence[str] = CHILD, free_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available)
) -> Measured:
    """Runs `child` on the GGUF at `model` and writes clip_bounds.bin beside it. Never raises for what the run itself does wrong."""
    output = beside(model)
    if kept := _better(output, model):
        return Measured(output, (kept,))
    stranger = _whose(output, model)
    size, free = sum(part.file_size for part in read_parts(model)), free_bytes()
    if size + MARGIN > free:
        needs = f"the run needs {human_bytes(size + MARGIN)} of memory, {human_bytes(free)} are free"
        return _without(f"{needs}; measure on a larger machine with `a3b calibrate {model}`", stranger)
    threads = max(1, min(psutil.cpu_count(logical=False) or 1, size // BYTES_PER_THREAD))
    done = subprocess.run([*child, str(model), str(output), str(threads)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        return _without(f"the measuring run {_end(done.returncode)}: {_last_words(done.stderr)}", stranger)
    return Measured(output, (f"an older file was replaced: {stranger}",) if stranger else ())


def _better(output: Path, model: Path) -> str:
    """What to say about an existing `output` that was measured on this model with more text, as `a3b calibrate` does; "" else."""
    try:
        header = read_bounds(output).header if output.exists() else None
        if header is None or header.tokens <= MAX_TOKENS or header.model_id != model_id(read_gguf(model)):
            return ""
    except A3BError:
        return ""
    return f"{output} was kept: it was measured on {header.tokens:,} tokens, this run would use {MAX_TOKENS}"


def _without(why: str, stranger: str) -> Measured:
    notes = (f"no {FILE_NAME} was written: {why}", *((f"the one that stands there is older: {stranger}",) if stranger else ()))
    return Measured(None, notes)


def _whose(output: Path, model: Path) -> str:
    """What is wrong with an existing `output` for the file `model`; "" when there is none, or when it is of this very file."""
    if not output.exists():
        return ""
    try:
        return check_model(read_bounds(output), read_gguf(model), output)
    except A3BError as error:
        return error.message


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _last_words(stderr: str) -> str:
    """What the child said went wrong: ggml's assertion when there is one, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    return (asserted or lines or ["it said nothing"])[-1]
