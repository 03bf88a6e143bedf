"""A machine as the planner sees it: memories and cores. Values only; `a3b_gguf.probe` fills them in for the machine at hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from a3b_gguf.errors import UsageError
from a3b_gguf.units import GIB, MIB

# What a described machine has in use before a model is loaded, since nobody can measure it. RAM: an operating system with a
# desktop. VRAM: a desktop without a browser that uses the GPU; published readings of nvidia-smi lie 0.25-0.55 GiB above the sum
# of llama.cpp's own buffers, half of it the driver context, which is a term of its own.
RAM_IN_USE = 2 * GIB
VRAM_IN_USE = 256 * MIB
READ_FOR_WRITTEN = 4
DDR = re.compile(r"(?:lp)?ddr[345]x?-(\d{3,5})(?:x(\d{1,2}))?")
RATE = re.compile(r"(\d+(?:\.\d+)?) ?gb(?:/s|ps)")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. name: llama.cpp's ("CUDA0"), or "GPU0" when only its size was described; total and free are bytes.

    shares_ram: it has no memory of its own (integrated GPUs, Apple): what it takes is taken from RAM too. bandwidth: of its memory,
    pcie: of its link to RAM, bytes a second; flops: dense matrix operations of 16 bits a second. None: not known.
    """

    name: str
    total: int
    free: int
    description: str = ""
    shares_ram: bool = False
    bandwidth: float | None = None
    pcie: float | None = None
    flops: float | None = None

    @property
    def backend(self) -> str:
        """The part of llama.cpp that drives it: "CUDA", "Vulkan", "ROCm", "MTL"; "GPU" when it was only described by size."""
        return self.name.rstrip("0123456789")


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Seconds of a model's attention on the processor, with flash attention and without: for a token that is written after n_kv others,
    and for one of a prompt so long that is read.
    """

    n_kv: int
    write: tuple[float, float]
    read: tuple[float, float]

    @property
    def gain(self) -> float:
        """How many times as long a chat takes with flash attention, which reads READ_FOR_WRITTEN tokens for each that it writes."""
        with_it, without = (write + READ_FOR_WRITTEN * read for write, read in zip(self.write, self.read, strict=True))
        return with_it / without


@dataclass(frozen=True, slots=True)
class Machine:
    """RAM in bytes, physical cores, GPUs in llama.cpp's order. described: told by flags, not measured.

    ram_bandwidth: bytes a second; None: not known. system: "Linux", "Windows", "Darwin"; empty: not known. attention: of the model that is
    planned for, where it was measured.
    """

    ram_total: int
    ram_available: int
    n_cores: int
    gpus: tuple[Device, ...] = ()
    described: bool = False
    notes: tuple[str, ...] = ()
    ram_bandwidth: float | None = None
    system: str = ""
    attention: AttentionCost | None = None


def with_vram(machine: Machine, vram: tuple[int, ...]) -> Machine:
    """`machine` with other GPUs: one for each size in bytes; a size of 0 is no GPU."""
    sizes = [size for size in vram if size > 0]
    return with_gpus(machine, tuple(Device(f"GPU{i}", size, size, "described") for i, size in enumerate(sizes)))


def with_gpus(machine: Machine, gpus: tuple[Device, ...]) -> Machine:
    """`machine` with the described `gpus` in place of its own, VRAM_IN_USE taken from each that has memory of its own."""
    taken = tuple(gpu if gpu.shares_ram else replace(gpu, free=max(0, gpu.total - VRAM_IN_USE)) for gpu in gpus)
    return replace(machine, gpus=taken, described=True, notes=())


def with_ram(machine: Machine, ram: int) -> Machine:
    """`machine` with `ram` bytes of RAM, RAM_IN_USE of them taken (at most half of a small one), of unknown speed."""
    return replace(machine, ram_total=ram, ram_available=ram - min(RAM_IN_USE, ram // 2), described=True, ram_bandwidth=None)


def ram_bandwidth(text: str) -> float:
    """Bytes a second of "DDR5-6000" (two channels of 64 bits), "DDR4-3200x4" (four) or "89GB/s". Raises UsageError for anything else."""
    words = text.strip().lower()
    if rate := RATE.fullmatch(words):
        return float(rate[1]) * 1e9
    ddr = DDR.fullmatch(words)
    if not ddr or ddr[2] == "0":
        hint = "write it like 89GB/s, DDR5-6000 or DDR4-3200x4"
        raise UsageError(f"--ram-bandwidth: {text!r} is neither a rate nor a kind of memory", hint)
    return int(ddr[1]) * 1e6 * 8 * int(ddr[2] or 2)
