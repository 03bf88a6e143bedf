"""RAM as this process may use it: what the machine has, or what its container leaves of it."""

from __future__ import annotations

from dataclasses import dataclass

from a3b_gguf.probe.cgroup import MemoryLimit, memory_limit
from a3b_gguf.units import human_bytes


@dataclass(frozen=True, slots=True)
class RAM:
    """Bytes. available: what can be had without swapping."""

    total: int
    available: int
    notes: tuple[str, ...] = ()


def ram() -> RAM:
    import psutil

    memory = psutil.virtual_memory()
    return within(RAM(int(memory.total), int(memory.available)), memory_limit())


def within(machine: RAM, limit: MemoryLimit | None) -> RAM:
    """`machine` as a container with `limit` sees it."""
    if limit is None or limit.total >= machine.total:
        return machine
    note = f"RAM: a container or service limit of {human_bytes(limit.total)} counts, not the machine's {human_bytes(machine.total)}"
    return RAM(limit.total, min(machine.available, limit.left), (note,))
