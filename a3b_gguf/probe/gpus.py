"""GPUs as the planner sees them: llama.cpp's list, completed by what the driver and the table of cards know."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf.errors import MachineLacks
from a3b_gguf.machine import Device
from a3b_gguf.probe import nvidia

UNIFIED_BACKENDS = ("MTL", "Metal")  # Apple: one memory, though llama.cpp calls the device a GPU


def gpus() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The GPUs that llama.cpp would use, and notes. Raises MachineLacks when one does not say how much memory it has."""
    from a3b_gguf.llama import devices

    listed = devices.gpus()
    cards, notes = nvidia.cards(tuple(each.bus_id for each in listed if each.backend == "CUDA" and each.bus_id))
    found: list[Device] = []
    held: list[str] = []
    for each in listed:
        if not each.total:
            raise MachineLacks(
                f"{each.name} ({each.description}) does not say how much memory it has",
                "tell the planner with --vram, like --vram 16GiB",
            )
        shares = each.kind == "igpu" or each.backend in UNIFIED_BACKENDS
        device = Device(each.name, each.total, each.free, each.description, shares)
        card = cards.get(each.bus_id, nvidia.Card())
        found.append(replace(device, bandwidth=card.bandwidth, pcie=card.pcie))
        held += nvidia.held(each.name, card.holders)
    return tuple(found), (*notes, *held)
