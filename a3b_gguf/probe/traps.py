"""Traps of an operating system that make a plan that fits slow or fail all the same."""

from __future__ import annotations

from collections.abc import Sequence

from a3b_gguf.machine import Device

WINDOWS_SHARED = (
    "Windows lends RAM to a GPU that is full instead of failing, and everything crawls: switch off the CUDA sysmem fallback in the "
    "driver's settings, and keep the margin"
)
WINDOWS_PINNED = "if loading says that pinned memory cannot be had, set GGML_CUDA_NO_PINNED=1: WDDM limits it"
WSL = (
    "WSL2: the memory limit is in .wslconfig, by default half of the RAM; keep the model inside of WSL's own disk, files under /mnt are "
    "read many times slower; a full GPU spills into RAM without a word, as on Windows"
)


def traps(system: str, release: str, gpus: Sequence[Device]) -> tuple[str, ...]:
    """Notes for `system` ("Linux", "Windows", "Darwin") with its kernel's `release`. Sources: P10, P11 of the public reports."""
    if system == "Windows" and any(not gpu.shares_ram for gpu in gpus):
        return WINDOWS_SHARED, WINDOWS_PINNED
    if system == "Linux" and "microsoft" in release.lower():
        return (WSL,)
    return ()
