"""How long llama.cpp's threads should spin for each other: tokens per second on a machine that does nothing else, and beside a busy one.

    python benchmarks/bench_spin.py [MODEL.gguf]

Without a model the embedded one is converted. Each setting of GNU OpenMP runs in a process of its own, with as many threads as there are
cores; beside it runs nothing, or one process that only counts. Limits: with what a3b sets, at least 0.8x the best setting on the idle
machine; with a given model at least 0.5x beside the other process (the embedded one's steps are shorter than a turn of the scheduler).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from a3b_convert import convert
from a3b_gguf.openmp import SPIN_COUNT

TINY = Path(__file__).parent.parent / "models" / "tiny-a3b"
OURS = f"GOMP_SPINCOUNT={SPIN_COUNT}, as a3b sets it"
SETTINGS = {
    "GNU OpenMP's default": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    OURS: {"GOMP_SPINCOUNT": SPIN_COUNT},
    "GOMP_SPINCOUNT=100000": {"GOMP_SPINCOUNT": "100000"},
}
N_STREAMS, N_STEPS, N_ROUNDS = 4, 40, 3
LEAST_IDLE, LEAST_BUSY = 0.8, 0.5


def measure(model: Path) -> float:
    """Tokens per second of N_STREAMS sequences that are computed together."""
    from a3b_gguf.llama.batch import Batch, decode
    from a3b_gguf.llama.load import load_model, open_context
    from a3b_gguf.llama.log import LlamaLog
    from a3b_gguf.llama.params import LoadParams

    n_threads = os.cpu_count() or 1
    params = LoadParams(1024, n_seq_max=N_STREAMS, n_outputs_max=N_STREAMS, n_threads=n_threads, n_threads_batch=n_threads)
    with LlamaLog(1000), load_model(model, params) as loaded, open_context(loaded, params) as context:
        batch = Batch(N_STREAMS)
        seconds = []
        for at in range(N_STEPS):
            batch.clear()
            for seq in range(N_STREAMS):
                batch.add(seq, at, [300 + at], 1)
            started = time.perf_counter()
            decode(context, batch)
            seconds.append(time.perf_counter() - started)
    return N_STREAMS / statistics.mean(seconds[N_STEPS // 4 :])


@contextmanager
def beside(busy: bool) -> Iterator[None]:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def run(model: Path, setting: dict[str, str]) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = [sys.executable, __file__, "--measure", str(model)]
    return float(subprocess.run(words, env={**environment, **setting}, capture_output=True, check=True, text=True).stdout)


def table(model: Path, busy: bool) -> dict[str, float]:
    """Medians, the settings in turns."""
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with beside(busy):
        for _ in range(N_ROUNDS):
            for name, setting in SETTINGS.items():
                found[name].append(run(model, setting))
    return {name: statistics.median(rates) for name, rates in found.items()}


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        print(measure(Path(sys.argv[2])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "tiny.gguf"
        if len(sys.argv) == 1:
            convert(TINY, model)
        idle, busy = table(model, False), table(model, True)
    print(f"{model.name}, {N_STREAMS} sequences, {os.cpu_count()} threads: tokens/s")
    for name in SETTINGS:
        print(f"{name:36} {idle[name]:8.1f} alone {busy[name]:8.1f} beside a busy process")
    found = [("alone", idle, LEAST_IDLE), *([("beside a busy process", busy, LEAST_BUSY)] if len(sys.argv) > 1 else [])]
    misses = [
        (where, rates[OURS] / max(rates.values()), least) for where, rates, least in found if rates[OURS] < least * max(rates.values())
    ]
    for where, ratio, least in misses:
        print(f"beyond the limit: {where} {ratio:.2f}x the best setting, at least {least}x is the limit")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
