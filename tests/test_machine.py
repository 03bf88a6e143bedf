"""The machine as a value: described by sizes, measured by the probe."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from a3b_gguf import probe
from a3b_gguf.cli.wishes import machine_of, wishes_of
from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.llama import devices
from a3b_gguf.llama.devices import ListedDevice
from a3b_gguf.machine import RAM_IN_USE, VRAM_IN_USE, Device, Machine, with_ram, with_vram
from a3b_gguf.units import GIB, MIB

HERE = Machine(ram_total=64 * GIB, ram_available=50 * GIB, n_cores=8, gpus=(Device("CUDA0", 24 * GIB, 23 * GIB),))


def test_described_gpus_replace_those_at_hand() -> None:
    machine = with_vram(HERE, (16 * GIB, 8 * GIB))
    assert [(g.name, g.total, g.free) for g in machine.gpus] == [
        ("GPU0", 16 * GIB, 16 * GIB - VRAM_IN_USE),
        ("GPU1", 8 * GIB, 8 * GIB - VRAM_IN_USE),
    ]
    assert machine.described
    assert (machine.ram_total, machine.ram_available, machine.n_cores) == (64 * GIB, 50 * GIB, 8)


def test_no_vram_is_no_gpu() -> None:
    assert with_vram(HERE, (0,)).gpus == ()


def test_described_ram_has_a_system_in_it() -> None:
    machine = with_ram(HERE, 32 * GIB)
    assert (machine.ram_total, machine.ram_available) == (32 * GIB, 32 * GIB - RAM_IN_USE)
    assert machine.gpus == HERE.gpus
    assert with_ram(HERE, GIB).ram_available == GIB // 2


def test_the_machine_at_hand() -> None:
    machine = probe.machine()
    assert machine.ram_total == psutil.virtual_memory().total
    assert 0 < machine.ram_available <= machine.ram_total
    assert machine.n_cores >= 1
    assert not machine.described
    assert len(machine.gpus) == len(devices.gpus())


def test_llama_cpp_lists_its_cpu() -> None:
    cpu = next(device for device in devices.devices() if device.kind == "cpu")
    assert cpu.backend == "CPU"
    assert cpu.total == pytest.approx(psutil.virtual_memory().total, rel=0.01)


def listed(name: str, kind: str, backend: str, total: int = 8 * GIB) -> ListedDevice:
    return ListedDevice(name, "a card", kind, backend, max(0, total - GIB), total)


def test_gpus_are_those_that_llama_cpp_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, igpu, rpc, cpu = (
        listed("CUDA0", "gpu", "CUDA"), listed("Vulkan0", "igpu", "Vulkan"), listed("RPC0", "gpu", "RPC"), listed("CPU", "cpu", "CPU"),
    )  # fmt: skip
    monkeypatch.setattr(devices, "devices", lambda: (igpu, cuda, rpc, cpu))
    assert devices.gpus() == (cuda,)
    assert probe.machine().gpus == (Device("CUDA0", 8 * GIB, 7 * GIB, "a card"),)
    monkeypatch.setattr(devices, "devices", lambda: (igpu, cpu))
    assert probe.machine().gpus == (Device("Vulkan0", 8 * GIB, 7 * GIB, "a card", shares_ram=True),)
    monkeypatch.setattr(devices, "devices", lambda: (listed("MTL0", "gpu", "MTL"), cpu))
    assert probe.machine().gpus[0].shares_ram


def test_a_gpu_that_hides_its_memory_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "devices", lambda: (listed("SYCL0", "gpu", "SYCL", 0),))
    with pytest.raises(MachineLacks, match="SYCL0") as caught:
        probe.machine()
    assert "--vram" in caught.value.hint


def test_flags_describe_a_machine() -> None:
    assert machine_of(None, None) is None
    machine = machine_of(["16GiB", "12GB"], "32GiB")
    assert machine is not None
    assert [gpu.total for gpu in machine.gpus] == [16 * GIB, 12 * 10**9]
    assert machine.ram_total == 32 * GIB
    only_ram = machine_of(None, "48GiB")
    assert only_ram is not None
    assert (only_ram.ram_total, only_ram.gpus) == (48 * GIB, probe.machine().gpus)
    no_gpu = machine_of(["0"], None)
    assert no_gpu is not None
    assert (no_gpu.gpus, no_gpu.ram_total) == ((), psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("vram", "ram", "flag"), [(["16 apples"], None, "--vram"), (["16GiB"], "much", "--ram"), (["-3"], None, "--vram")]
)
def test_wrong_sizes_name_their_flag(vram: list[str], ram: str | None, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag}: "):
        machine_of(vram, ram)


def test_flags_become_wishes() -> None:
    wishes = wishes_of("64k", 4, "q8_0/q4_0", 20, 7, "512MiB")
    assert (wishes.n_ctx, wishes.n_parallel, wishes.kv_type) == (64000, 4, "q8_0/q4_0")
    assert (wishes.n_gpu_layers, wishes.n_cpu_moe, wishes.margin) == (20, 7, 512 * MIB)
    for flag, values in {
        "--ctx": ("0", 1, "auto", None, None, "1GiB"),
        "--parallel": (None, 0, "auto", None, None, "1GiB"),
        "--kv-type": (None, 1, "q3_0", None, None, "1GiB"),
        "--n-gpu-layers": (None, 1, "auto", -1, None, "1GiB"),
        "--n-cpu-moe": (None, 1, "auto", None, -1, "1GiB"),
        "--margin": (None, 1, "auto", None, None, "none"),
    }.items():
        with pytest.raises(UsageError, match=f"{flag}: "):
            wishes_of(*values)


def test_a_described_machine_needs_no_engine() -> None:
    code = (
        "import sys; from a3b_gguf.cli.wishes import machine_of; machine_of(['8GiB'], '32GiB'); "
        "print([m for m in ('llama_cpp', 'numpy', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
