"""What the quality benchmarks share: files made with `a3b`, chats of tiny-a3b's corpus, evaluations as values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny-a3b"
A3B = str(Path(sys.executable).parent / "a3b")
CALIBRATION_SEED, HELD_OUT_SEED = 4711, 987654
# tiny-a3b is too small for more, and llama.cpp's threads wait for each other by spinning: on a busy machine two are slower than one.
THREADS = 1


def run(*words: object) -> str:
    """`a3b words...`; what it printed. Raises RuntimeError with its own words when it fails."""
    done = subprocess.run([A3B, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a3b {' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout


def made(folder: Path, name: str, command: str, source: Path, *flags: object) -> Path:
    """A file of `a3b convert` or `a3b quantize`."""
    path = folder / f"{name}.gguf"
    run(command, source, "-o", path, *flags)
    return path


def chats(count: int, seed: int) -> str:
    """Rendered chats of tiny-a3b's corpus; another seed, other chats."""
    code = f"import corpus; print('\\n'.join(corpus.conversations({count}, {seed})), end='')"
    return subprocess.run([sys.executable, "-c", code], cwd=TINY, capture_output=True, text=True, check=True).stdout


def evaluated(model: Path, base: Path, *flags: object) -> dict[str, Any]:
    """`a3b eval --json` of a model against its base."""
    found: dict[str, Any] = json.loads(run("eval", model, "--base", base, "--threads", THREADS, "--json", *flags))
    return found


def kl(found: dict[str, Any], name: str = "kl_mean") -> float:
    return float(found["scores"]["divergence"][name]["value"])
