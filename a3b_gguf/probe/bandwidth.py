"""How fast RAM is read and written: McCalpin's STREAM triad (a = b + s c) on all physical cores, remembered on disk.

Source: https://www.cs.virginia.edu/stream/ref.html. STREAM counts 24 bytes an element; the processor moves 32, since it fetches
the line that it is about to overwrite. The planner wants what the memory moves, so 32 are counted here.
"""

from __future__ import annotations

import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from a3b_gguf.user_cache import cache_folder, keep_text

ELEMENTS = 8 << 20  # of float64: 64 MiB an array, beyond the caches of common processors
BYTES_AN_ELEMENT = 32
SECONDS = 1.0
KEPT_SECONDS = 90 * 86400  # a memory module may be added
KEPT_WHEN_BUSY_SECONDS = 600
BUSY = 0.5  # share of the cores at work, beyond which the measurement says more about them than about RAM


def ram_bandwidth(n_cores: int, file: Path | None = None) -> tuple[float | None, tuple[str, ...]]:
    """Bytes a second, and notes. From `file` when it holds a measurement of this machine that is not old."""
    file = file or cache_file()
    known = recall(file, n_cores)
    if known is not None:
        return known, ()
    busy = is_busy()
    measured = measure(n_cores)
    if busy:
        notes = remember(file, n_cores, measured, KEPT_WHEN_BUSY_SECONDS)
        return measured, ("RAM bandwidth was measured while other work ran; it will soon be measured again", *notes)
    return measured, remember(file, n_cores, measured)


def is_busy() -> bool:
    """Whether other work runs, so that what is measured now is not to be kept for long. Never on Windows, which does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1) > BUSY
    except (OSError, AttributeError):
        return False


def cache_file() -> Path:
    """Where the measurement is kept."""
    return cache_folder() / "ram-bandwidth.json"


def recall(file: Path, n_cores: int) -> float | None:
    """The measurement in `file`, unless it is of another machine, too old or not readable: then it is taken again."""
    try:
        held = json.loads(file.read_text())
        fresh = held["machine"] == _machine(n_cores) and 0 <= held["until"] - time.time() <= KEPT_SECONDS
        return float(held["bytes_per_second"]) if fresh and held["bytes_per_second"] > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(file: Path, n_cores: int, bytes_per_second: float, seconds: float = KEPT_SECONDS) -> tuple[str, ...]:
    """Keeps a measurement for so long; a note when that is not possible."""
    held = {"machine": _machine(n_cores), "until": time.time() + seconds, "bytes_per_second": bytes_per_second}
    try:
        keep_text(file, json.dumps(held))
    except OSError as error:
        return (f"RAM bandwidth is measured each time: {file} cannot be written ({error.strerror})",)
    return ()


def _machine(n_cores: int) -> list[Any]:
    """What tells one machine from another: a home folder may be shared by several."""
    return [platform.node(), platform.machine(), n_cores]


def measure(n_threads: int, seconds: float = SECONDS) -> float:
    """Bytes a second of the best round within `seconds`; each of `n_threads` works on its own part."""
    import numpy as np

    triad = _compiled()
    a, b, c = (np.full(ELEMENTS, value) for value in (0.0, 1.0, 2.0))
    bounds = np.linspace(0, ELEMENTS, n_threads + 1).astype(int)
    parts = [(a[i:j], b[i:j], c[i:j]) for i, j in pairwise(bounds)]
    triad(a[:1], b[:1], c[:1])  # compiles
    best, end = float("inf"), time.perf_counter() + seconds
    with ThreadPoolExecutor(n_threads) as pool:
        while True:
            start = time.perf_counter()
            list(pool.map(lambda part: triad(*part), parts))
            now = time.perf_counter()
            best = min(best, now - start)
            if now > end:
                return BYTES_AN_ELEMENT * ELEMENTS / best


def _compiled() -> Any:
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(_triad)
    except RuntimeError:  # no folder for the compiled code can be written
        return numba.njit(nogil=True)(_triad)


def _triad(a: Any, b: Any, c: Any) -> None:
    for i in range(len(a)):
        a[i] = b[i] + 3.0 * c[i]
