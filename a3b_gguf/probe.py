"""The machine as it is: RAM and cores from the operating system, GPUs from llama.cpp's own device list."""

from __future__ import annotations

import os

from a3b_gguf.errors import MachineLacks
from a3b_gguf.machine import Device, Machine

UNIFIED_BACKENDS = ("MTL", "Metal")  # Apple: one memory, though llama.cpp calls the device a GPU


def machine(gpus: bool = True) -> Machine:
    """The machine at hand. gpus: without it llama.cpp is not loaded and the machine has no GPU.

    Raises MachineLacks when a GPU does not say how much memory it has.
    """
    import psutil

    memory = psutil.virtual_memory()
    # A container may report no physical cores; half of the logical ones is then the usual truth on x86.
    n_cores = psutil.cpu_count(logical=False) or max(1, (os.cpu_count() or 2) // 2)
    return Machine(int(memory.total), int(memory.available), n_cores, _gpus() if gpus else ())


def _gpus() -> tuple[Device, ...]:
    from a3b_gguf.llama import devices

    found = []
    for device in devices.gpus():
        if not device.total:
            raise MachineLacks(
                f"{device.name} ({device.description}) does not say how much memory it has",
                "tell the planner with --vram, like --vram 16GiB",
            )
        shares = device.kind == "igpu" or device.backend in UNIFIED_BACKENDS
        found.append(Device(device.name, device.total, device.free, device.description, shares))
    return tuple(found)
