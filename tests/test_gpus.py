"""Cards by name: what people type finds the right row, and no row is nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3b_gguf import gpus
from a3b_gguf.cli.wishes import machine_of
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.machine import VRAM_IN_USE, Device, ram_bandwidth
from a3b_gguf.units import GIB

# typed -> memory in GiB, GB/s
FOUND = [
    ("RTX 4070 Ti SUPER", 16, 672),
    ("nvidia geforce rtx 4070 ti super", 16, 672),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, 576),
    ("3090", 24, 936),
    ("rtx3090 24gb", 24, 936),
    ("RTX 3060 12 GB", 12, 360),
    ("RTX 4060 Ti 16GB", 16, 288),
    ("RX 7900 XTX", 24, 960),
    ("AMD Radeon RX 6800 XT", 16, 512),
    ("Intel(R) Arc(TM) B580 Graphics", 12, 456),
]


@pytest.mark.parametrize(("typed", "memory", "bandwidth"), FOUND)
def test_cards_are_found_as_people_write_them(typed: str, memory: int, bandwidth: float) -> None:
    gpu = gpus.find(typed)
    assert (gpu.memory, gpu.bandwidth) == (memory * GIB, bandwidth * 1e9)


@pytest.mark.parametrize(
    ("typed", "says", "hint"),
    [
        ("RTX 3060", "could be RTX 3060 12GB or RTX 3060 8GB", "say which"),
        ("RTX 4070 Ti SUPPER", "no card 'RTX 4070 Ti SUPPER'", "RTX 4070 Ti SUPER"),
        ("RTX 4090 16GB", "RTX 4090 has 24 GiB of memory, not 16", "RTX 4090"),
        ("Voodoo 2", "no card 'Voodoo 2'", "--vram"),
        ("", "no card ''", "--vram"),
    ],
)
def test_unknown_cards_are_refused_with_the_nearest_names(typed: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        gpus.find(typed)
    assert hint in caught.value.hint


def test_every_row_finds_itself_and_is_plausible() -> None:
    found = gpus.entries()
    assert len({gpu.name for gpu in found}) == len(found) > 80
    for gpu in found:
        assert gpus.find(gpu.name) == gpu
        assert 60e9 <= gpu.bandwidth <= 2000e9
        assert 5e9 < gpu.pcie < 70e9
        assert 2e12 < gpu.flops < 500e12
        assert gpu.source.startswith("https://")
        assert gpu.unified == (gpu.memory == 0)
    for vendor in ("NVIDIA", "AMD", "Intel", "Apple"):
        assert any(gpu.vendor.startswith(vendor) for gpu in found)


@pytest.mark.parametrize(
    "text",
    [
        "[[series]]\nvendor = 'x'\nbackend = 'CUDA'\nsource = 's'\nmatrix = 1\ncards = [['A', 8, 200, 9, 16, 1]]",
        "[[series]]\nvendor = 'x'\nbackend = 'CUDA'\nsource = 's'\nmatrix = 1\ncards = [['A', 8, 200]]",
        "[[series]]\nvendor = 'x'\ncolour = 'red'\nbackend = 'CUDA'\nsource = 's'\nmatrix = 1\ncards = []",
        "not = [toml",
    ],
)
def test_a_wrong_row_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"gpus\.toml"):
        gpus.entries(path)


def test_flags_describe_cards() -> None:
    machine = machine_of(None, "64GiB", ["RTX 3090", "RTX 3060 12GB", "RX 7600"], "DDR5-6000", 12)
    assert machine is not None
    assert [gpu.name for gpu in machine.gpus] == ["CUDA0", "CUDA1", "Vulkan0"]
    assert machine.gpus[0].free == 24 * GIB - VRAM_IN_USE
    assert machine.gpus[0].flops == pytest.approx(142.4e12)
    assert (machine.ram_bandwidth, machine.n_cores) == (96e9, 12)
    apple = machine_of(None, "48GiB", ["M4 Max"])
    assert apple is not None
    assert (apple.gpus[0].total, apple.gpus[0].shares_ram, apple.gpus[0].backend) == (36 * GIB, True, "MTL")
    assert apple.ram_bandwidth is None
    with pytest.raises(UsageError, match="--vram and --gpu"):
        machine_of(["8GiB"], None, ["RTX 3090"])


def test_a_measured_card_gets_what_the_table_knows() -> None:
    device = Device("CUDA0", 23 * GIB, 20 * GIB, "NVIDIA GeForce RTX 3090")
    known = gpus.known(device)
    assert (known.bandwidth, known.total, known.free) == (936e9, 23 * GIB, 20 * GIB)
    measured = Device("CUDA0", 23 * GIB, 20 * GIB, "NVIDIA GeForce RTX 3090", bandwidth=900e9)
    assert gpus.known(measured).bandwidth == 900e9
    strange = Device("CUDA0", 23 * GIB, 20 * GIB, "Some Other Card")
    assert gpus.known(strange) == strange


@pytest.mark.parametrize(
    ("text", "rate"),
    [("DDR5-6000", 96e9), ("ddr4-3200", 51.2e9), ("DDR4-3200x4", 102.4e9), ("LPDDR5X-8533", 136.528e9), ("89.6 GB/s", 89.6e9)],
)
def test_ram_bandwidth_is_read_from_what_is_printed_on_it(text: str, rate: float) -> None:
    assert ram_bandwidth(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["fast", "DDR5", "DDR6-9000", "DDR4-3200x0", "96", "-1GB/s"])
def test_other_words_are_no_bandwidth(text: str) -> None:
    with pytest.raises(UsageError, match="--ram-bandwidth"):
        ram_bandwidth(text)
