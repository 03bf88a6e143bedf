"""Graphics cards by name: gpus.toml as typed rows, found by what people type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.machine import Device
from a3b_gguf.units import GIB

FILE = Path(__file__).with_name("gpus.toml")
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # bytes a second of one lane after its 128b/130b encoding
UNIFIED_SHARE = 0.75  # of RAM that such a GPU may take: Metal's recommendedMaxWorkingSetSize on most machines
SERIES_KEYS = {"vendor", "backend", "source", "checked", "matrix", "unified", "cards"}
IGNORED = re.compile(r"\b(nvidia|geforce|amd|radeon|intel|apple|ryzen ai|graphics|gpu)\b")
SERIES = re.compile(r"^(rtx|gtx|rx|arc|tesla)")
MEMORY = re.compile(r"\b(\d+) ?gi?b\b")


@dataclass(frozen=True, slots=True)
class GPU:
    """A row of gpus.toml. memory: bytes, 0 when it is the machine's RAM; bandwidth and pcie: bytes a second; flops: a second."""

    name: str
    vendor: str
    backend: str
    memory: int
    bandwidth: float
    pcie: float
    flops: float
    unified: bool
    source: str


def entries(path: Path = FILE) -> tuple[GPU, ...]:
    """Every card. Raises BadInput that names the series and the card whose row is wrong."""
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}", "install a3b again") from error
    return tuple(gpu for series in table.get("series", ()) for gpu in cards(series, path))


def cards(series: dict[str, Any], path: Path) -> list[GPU]:
    if unknown := sorted(set(series) - SERIES_KEYS):
        raise BadInput(f"{path}: unknown key {unknown[0]} in series {series.get('vendor')}")
    unified, found = bool(series.get("unified", False)), []
    for row in series["cards"]:
        if len(row) != 6 or not isinstance(row[0], str) or not all(isinstance(n, int | float) and n >= 0 for n in row[1:]):
            raise BadInput(f"{path}: {row} is no card", "write [name, GiB, GB/s, PCIe generation, lanes, TFLOPS]")
        name, memory, bandwidth, generation, lanes, tflops = row
        if generation not in PCIE_LANE or (memory == 0) != unified:
            raise BadInput(f"{path}: {name}: PCIe {generation} or memory {memory} cannot be")
        found.append(
            GPU(
                name=name,
                vendor=series["vendor"],
                backend=series["backend"],
                memory=int(memory * GIB),
                bandwidth=bandwidth * 1e9,
                pcie=lanes * PCIE_LANE[generation],
                flops=tflops * series["matrix"] * 1e12,
                unified=unified,
                source=series["source"],
            )
        )
    return found


def find(text: str) -> GPU:
    """The card that people call `text`. Case, maker and spaces do not matter, the memory only where two cards differ in nothing else.

    Raises UsageError with the nearest names.
    """
    known = entries()
    name, memory = parted(text)
    same = [gpu for gpu in known if name in (parted(gpu.name)[0], SERIES.sub("", parted(gpu.name)[0]))]
    sized = [gpu for gpu in same if memory in (None, gpu.memory // GIB) or gpu.unified]
    if len(sized) == 1:
        return sized[0]
    if sized:
        raise UsageError(f"--gpu: {text!r} could be {' or '.join(gpu.name for gpu in sized)}", "say which")
    if same:
        sizes = " or ".join(f"{gpu.memory // GIB} GiB" for gpu in same)
        raise UsageError(f"--gpu: {same[0].name} has {sizes} of memory, not {memory} GiB", f"say --gpu {same[0].name!r}")
    by_name = {parted(gpu.name)[0]: gpu.name for gpu in known}
    near = ", ".join(by_name[key] for key in get_close_matches(name, by_name, n=3, cutoff=0.5))
    hint = f"near: {near}; or describe it by its memory: --vram 16GiB" if near else "describe it by its memory: --vram 16GiB"
    raise UsageError(f"--gpu: there is no card {text!r} in gpus.toml", hint)


def parted(text: str) -> tuple[str, int | None]:
    """ "NVIDIA GeForce RTX 4060 Ti 16 GB" -> ("rtx4060ti", 16) """
    words = IGNORED.sub(" ", re.sub(r"\((r|tm)\)", " ", text.lower()))
    size = MEMORY.search(words)
    return re.sub(r"[^a-z0-9+]", "", MEMORY.sub(" ", words)), int(size[1]) if size else None


def devices(found: tuple[GPU, ...], ram: int) -> tuple[Device, ...]:
    """Cards as the planner's devices, numbered by backend as llama.cpp numbers them. ram: bytes, a share of which a unified one takes."""
    counts: dict[str, int] = {}
    made = []
    for gpu in found:
        number = counts.setdefault(gpu.backend, 0)
        counts[gpu.backend] += 1
        total = int(ram * UNIFIED_SHARE) if gpu.unified else gpu.memory
        name = f"{gpu.vendor} {gpu.name}"
        made.append(Device(f"{gpu.backend}{number}", total, total, name, gpu.unified, gpu.bandwidth, gpu.pcie, gpu.flops))
    return tuple(made)


def known(device: Device) -> Device:
    """`device` with what the table says of the card that its description names; unchanged when it names none."""
    if not re.search(r"\d", device.description) or (device.bandwidth and device.pcie and device.flops):
        return device  # every card's name has a number in it
    try:
        gpu = find(device.description)
    except UsageError:
        return device
    return Device(
        device.name,
        device.total,
        device.free,
        device.description,
        device.shares_ram,
        device.bandwidth or gpu.bandwidth,
        device.pcie or gpu.pcie,
        device.flops or gpu.flops,
    )
