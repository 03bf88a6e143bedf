"""What NVIDIA's driver tells of a card beyond llama.cpp's list: who holds its memory, how fast it is. Through nvidia-ml-py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from a3b_gguf.units import MIB

# Bytes a second of one PCIe lane after its line code, by generation. Source: PCI Express base specifications 1.0 to 6.0.
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
MOST_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with memory on a card. n_bytes: None where the driver does not say, as on Windows."""

    pid: int
    name: str
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """bandwidth, pcie: bytes a second, None when the driver does not say."""

    bandwidth: float | None = None
    pcie: float | None = None
    holders: tuple[Holder, ...] = ()


def cards(bus_ids: tuple[str, ...]) -> tuple[dict[str, Card], tuple[str, ...]]:
    """The cards at these PCI addresses ("0000:c1:00.0"), and notes on what could not be read."""
    if not bus_ids:
        return {}, ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {}, (f"NVIDIA's management library cannot be read ({error}): who holds the card's memory is not known",)
    try:
        return {bus_id: _card(pynvml, bus_id) for bus_id in bus_ids}, ()
    except pynvml.NVMLError as error:
        return {}, (f"NVIDIA's management library fails ({error}): who holds the card's memory is not known",)
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: Any, bus_id: str) -> Card:
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())

    def told(question: str, *more: Any) -> Any:
        """The answer, or None: cards differ in what they tell, and laptops in what they allow."""
        try:
            return getattr(nvml, question)(handle, *more)
        except nvml.NVMLError:
            return None

    bits, megahertz = told("nvmlDeviceGetMemoryBusWidth"), told("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM)
    generation, lanes = told("nvmlDeviceGetMaxPcieLinkGeneration"), told("nvmlDeviceGetMaxPcieLinkWidth")
    processes = [
        *(told("nvmlDeviceGetComputeRunningProcesses") or ()),
        *(told("nvmlDeviceGetGraphicsRunningProcesses") or ()),
    ]
    return Card(
        bandwidth=bandwidth(bits, megahertz),
        pcie=LANE[generation] * lanes if generation in LANE and lanes else None,
        holders=tuple(_holder(nvml, process) for process in {p.pid: p for p in processes}.values()),
    )


def bandwidth(bits: int | None, megahertz: int | None) -> float | None:
    """Bytes a second of a memory bus: two transfers a clock as the driver counts it (RTX 3060: 192 bits, 7,501 MHz: 360 GB/s)."""
    return bits / 8 * megahertz * 1e6 * 2 if bits and megahertz else None


def _holder(nvml: Any, process: Any) -> Holder:
    try:
        name = nvml.nvmlSystemGetProcessName(process.pid)
    except nvml.NVMLError:
        name = "?"
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return Holder(process.pid, text.replace("\\", "/").rsplit("/", 1)[-1], process.usedGpuMemory)


def held(name: str, holders: tuple[Holder, ...]) -> tuple[str, ...]:
    """A note that names the processes that hold most of the memory of the card `name`."""
    if not holders:
        return ()
    most = sorted(holders, key=lambda h: -(h.n_bytes or 0))[:MOST_HOLDERS]
    listed = ", ".join(f"{h.name} ({h.pid}{'' if h.n_bytes is None else f', {h.n_bytes / MIB:,.0f} MiB'})" for h in most)
    rest = f" and {len(holders) - len(most)} more" if len(holders) > len(most) else ""
    return (f"{name}: memory is held by {listed}{rest}",)
