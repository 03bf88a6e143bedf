"""A machine as the planner sees it: memories and cores. Values only; `a3b_gguf.probe` fills them in for the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

from a3b_gguf.units import GIB, MIB

# What a described machine has in use before a model is loaded, since nobody can measure it. RAM: an operating system with a
# desktop. VRAM: a desktop without a browser that uses the GPU; published readings of nvidia-smi lie 0.25-0.55 GiB above the sum
# of llama.cpp's own buffers, half of it the driver context, which is a term of its own.
RAM_IN_USE = 2 * GIB
VRAM_IN_USE = 256 * MIB


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. name: llama.cpp's ("CUDA0"), or "GPU0" when described; total and free are bytes.

    shares_ram: it has no memory of its own (integrated GPUs, Apple): what it takes is taken from RAM too.
    """

    name: str
    total: int
    free: int
    description: str = ""
    shares_ram: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """RAM in bytes, physical cores, GPUs in llama.cpp's order. described: told by flags, not measured."""

    ram_total: int
    ram_available: int
    n_cores: int
    gpus: tuple[Device, ...] = ()
    described: bool = False
    notes: tuple[str, ...] = ()

    @property
    def vram_total(self) -> int:
        return sum(gpu.total for gpu in self.gpus)


def with_vram(machine: Machine, vram: tuple[int, ...]) -> Machine:
    """`machine` with other GPUs: one for each size in bytes; a size of 0 is no GPU."""
    sizes = [size for size in vram if size > 0]
    gpus = tuple(Device(f"GPU{i}", size, max(0, size - VRAM_IN_USE), "described") for i, size in enumerate(sizes))
    return replace(machine, gpus=gpus, described=True, notes=())


def with_ram(machine: Machine, ram: int) -> Machine:
    """`machine` with `ram` bytes of RAM, RAM_IN_USE of them taken (at most half of a small one)."""
    return replace(machine, ram_total=ram, ram_available=ram - min(RAM_IN_USE, ram // 2), described=True)
