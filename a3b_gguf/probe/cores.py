"""Physical cores that this process may use. llama.cpp's threads wait for each other, so more than that is slower, not faster."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.probe.cgroup import cpu_limit

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Cores:
    count: int
    notes: tuple[str, ...] = ()


def cores() -> Cores:
    import psutil

    logical = os.cpu_count() or 2
    # A container may report no physical cores; half of the logical ones is then the usual truth on x86.
    physical = psutil.cpu_count(logical=False) or max(1, logical // 2)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return usable(physical, logical, allowed, cpu_limit(), n_numa_nodes())


def usable(physical: int, logical: int, allowed: int, quota: float | None, n_nodes: int) -> Cores:
    """Of `physical` cores with `logical` threads those that are left by `allowed` logical ones and by a quota of CPU time."""
    count, notes = physical, []
    if allowed < logical:
        count = min(count, max(1, math.ceil(allowed * physical / logical)))
        notes.append(f"cores: this process may use {allowed} of {logical} logical ones, so {count} physical ones count")
    if quota is not None and quota < count:
        count = max(1, int(quota))
        notes.append(f"cores: a container or service limit of {quota:g} cores of CPU time counts")
    if n_nodes > 1:
        notes.append(f"RAM: {n_nodes} NUMA nodes; weights on the far one are read slower; numactl --interleave=all spreads them evenly")
    return Cores(count, tuple(notes))


def n_numa_nodes(folder: Path = NODES) -> int:
    """Memory banks with a distance between them; 1 where nobody says."""
    return max(1, sum(1 for node in folder.glob("node[0-9]*"))) if folder.is_dir() else 1
