"""The machine line by line, for a person: what it has, what stands in the way, what could not be read."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from a3b_gguf import __version__
from a3b_gguf.machine import Device, Machine
from a3b_gguf.units import GIB, human_bytes

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Line:
    """remark: empty when there is nothing to say about the value."""

    what: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    machine: Machine
    lines: tuple[Line, ...]


def survey(machine: Machine) -> Survey:
    """`machine` with what else matters to a model on it."""
    return Survey(
        machine,
        (
            Line("system", f"{platform.system()} {platform.release()}, {platform.machine()}", ""),
            Line("a3b", f"{__version__} on Python {platform.python_version()}, llama-cpp-python {version('llama-cpp-python')}"),
            Line("cores", f"{machine.n_cores} physical", "as many threads decode"),
            Line("RAM", f"{human_bytes(machine.ram_total)}, {human_bytes(machine.ram_available)} available"),
            _bandwidth(machine.ram_bandwidth),
            _swap(),
            _locked(),
            _huge_pages(HUGE_PAGES),
            *(_gpu(gpu) for gpu in machine.gpus),
            *(() if machine.gpus else (_no_gpu(),)),
        ),
    )


def _bandwidth(bytes_per_second: float | None) -> Line:
    if bytes_per_second is None:
        return Line("RAM bandwidth", "not measured")
    return Line("RAM bandwidth", f"{bytes_per_second / 1e9:.1f} GB/s", "measured; experts in RAM are read at this speed at most")


def _swap() -> Line:
    import psutil

    try:
        swap = psutil.swap_memory()
    except OSError as error:
        return Line("swap", "cannot be read", str(error))
    if not swap.total:
        return Line("swap", "none", "when RAM runs out, the kernel ends a process")
    remark = "in use: RAM is or was short" if swap.used > swap.total // 4 else ""
    return Line("swap", f"{human_bytes(swap.total)}, {human_bytes(swap.used)} used", remark)


def _locked() -> Line:
    if sys.platform == "win32":
        return Line("locked memory", "limited by the working set", "a plan does not lock by itself")
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Line("locked memory", "no limit")
    remark = "weights cannot be locked into RAM; ulimit -l raises it" if limit < GIB else ""
    return Line("locked memory", f"at most {human_bytes(limit)}", remark)


def _huge_pages(file: Path) -> Line:
    try:
        text = file.read_text()
    except OSError:
        return Line("huge pages", "not known")
    chosen = text.partition("[")[2].partition("]")[0]
    return Line("huge pages", chosen or "not known", "weights in RAM are read slower without them" if chosen == "never" else "")


def _gpu(gpu: Device) -> Line:
    speed = f", {gpu.bandwidth / 1e9:,.0f} GB/s" if gpu.bandwidth else ""
    link = f", PCIe {gpu.pcie / 1e9:.1f} GB/s" if gpu.pcie else ""
    shared = "its memory is the machine's RAM" if gpu.shares_ram else ""
    return Line(gpu.name, f"{gpu.description}: {human_bytes(gpu.total)}, {human_bytes(gpu.free)} free{speed}{link}", shared)


def _no_gpu() -> Line:
    return Line(
        "GPU", "none that llama.cpp sees", "a card is seen when llama-cpp-python was built for it, like CMAKE_ARGS=-DGGML_CUDA=on at set-up"
    )
