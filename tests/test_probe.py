"""The probe: limits of containers, cores, bandwidth and its memory on disk, NVIDIA's driver, and what doctor says of it."""

from __future__ import annotations

import json
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from a3b_gguf import probe
from a3b_gguf.llama import devices
from a3b_gguf.llama.devices import ListedDevice
from a3b_gguf.machine import Device
from a3b_gguf.probe import bandwidth, nvidia
from a3b_gguf.probe.cgroup import MemoryLimit, cpu_limit, memory_limit
from a3b_gguf.probe.cores import n_numa_nodes, usable
from a3b_gguf.probe.ram import RAM, within
from a3b_gguf.probe.survey import survey
from a3b_gguf.probe.traps import traps
from a3b_gguf.units import GIB, MIB
from command import a3b


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_2_takes_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "fs",
        {
            "docker/memory.max": str(8 * GIB),
            "docker/memory.current": str(5 * GIB),
            "docker/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "docker/job/memory.max": str(64 * GIB),
            "docker/job/memory.current": str(GIB),
            "docker/cpu.max": "max 100000\n",
            "docker/job/cpu.max": "250000 100000\n",
        },
    )
    proc = tree(tmp_path, {"cgroup": "0::/docker/job\n"}) / "cgroup"
    assert memory_limit(proc, mount) == MemoryLimit(8 * GIB, 3 * GIB)
    assert cpu_limit(proc, mount) == 2.5


def test_version_1_and_a_container_that_sees_only_its_own_folder(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "fs",
        {
            "memory/memory.limit_in_bytes": str(4 * GIB),
            "memory/memory.usage_in_bytes": str(3 * GIB),
            "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_quota_us": "150000",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    proc = tree(tmp_path, {"cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n"}) / "cgroup"
    assert memory_limit(proc, mount) == MemoryLimit(4 * GIB, 2 * GIB)
    assert cpu_limit(proc, mount) == 1.5


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/\n", "no colons\n", "0::/../..\n"])
def test_no_limit_is_none(tmp_path: Path, text: str) -> None:
    proc = tree(tmp_path, {"cgroup": text}) / "cgroup"
    mount = tree(tmp_path / "fs", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"})
    assert memory_limit(proc, mount) is None
    assert cpu_limit(proc, mount) is None
    assert memory_limit(tmp_path / "missing", tmp_path / "nowhere") is None


def test_a_limit_of_the_container_is_the_ram_that_counts() -> None:
    machine = RAM(64 * GIB, 50 * GIB)
    assert within(machine, None) == machine
    assert within(machine, MemoryLimit(128 * GIB, 0)) == machine
    limited = within(machine, MemoryLimit(16 * GIB, 6 * GIB))
    assert (limited.total, limited.available) == (16 * GIB, 10 * GIB)
    assert "16.00 GiB" in limited.notes[0]
    assert within(RAM(64 * GIB, 2 * GIB), MemoryLimit(16 * GIB, 0)).available == 2 * GIB
    assert MemoryLimit(GIB, 2 * GIB).left == 0


def test_cores_are_physical_and_allowed() -> None:
    assert usable(8, 16, 16, None, 1) == usable(8, 16, 16, 12.0, 1)
    assert usable(8, 16, 16, None, 1).count == 8
    half = usable(8, 16, 8, None, 1)
    assert (half.count, len(half.notes)) == (4, 1)
    assert usable(8, 16, 1, None, 1).count == 1
    assert usable(8, 16, 16, 2.5, 1).count == 2
    assert usable(8, 16, 16, 0.5, 1).count == 1
    assert "numactl" in usable(64, 128, 128, None, 4).notes[0]


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    assert n_numa_nodes(tmp_path / "missing") == 1
    assert n_numa_nodes(tmp_path) == 1
    for name in ("node0", "node1", "online"):
        (tmp_path / name).mkdir()
    assert n_numa_nodes(tmp_path) == 2


def test_bandwidth_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, taken = tmp_path / "cache" / "ram.json", []

    def measure(n_threads: int) -> float:
        taken.append(n_threads)
        return 4e10

    monkeypatch.setattr(bandwidth, "measure", measure)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert bandwidth.ram_bandwidth(4, file) == (4e10, ())
    assert bandwidth.ram_bandwidth(4, file) == (4e10, ())
    assert taken == [4]
    bandwidth.ram_bandwidth(8, file)
    assert taken == [4, 8]
    held = json.loads(file.read_text())
    damaged: tuple[Any, ...] = (
        {}, held | {"until": 0}, held | {"until": 1e12}, held | {"bytes_per_second": "fast"}, held | {"bytes_per_second": -1}, [1],
    )  # fmt: skip
    for damage in damaged:
        file.write_text(json.dumps(damage))
        assert bandwidth.recall(file, 8) is None
    file.write_bytes(b"\xff\xfe not json")
    assert bandwidth.recall(file, 8) is None


def test_a_busy_machine_is_measured_again_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda n_threads: 1e9)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    value, notes = bandwidth.ram_bandwidth(4, tmp_path / "ram.json")
    assert value == 1e9
    assert "again" in notes[0]
    assert bandwidth.recall(tmp_path / "ram.json", 4) == 1e9
    left = json.loads((tmp_path / "ram.json").read_text())["until"] - time.time()
    assert 0 < left <= bandwidth.KEPT_WHEN_BUSY_SECONDS


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda n_threads: 1e9)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    (tmp_path / "file").write_text("")
    value, notes = bandwidth.ram_bandwidth(4, tmp_path / "file" / "ram.json")
    assert value == 1e9
    assert "cannot be written" in notes[0]


def test_the_triad_moves_what_it_says() -> None:
    np = pytest.importorskip("numpy")
    a, b, c = np.zeros(5), np.arange(5.0), np.ones(5)
    bandwidth._compiled()(a, b, c)
    assert a.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert bandwidth.measure(2, seconds=0.01) > 1e8


class FakeNVML(types.SimpleNamespace):
    """NVIDIA's library as far as the probe asks it; a laptop card that hides its link."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_MEM = 2

    def __init__(self) -> None:
        super().__init__(calls=[], broken=False)

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> str:
        if bus_id != b"0000:01:00.0":
            raise self.NVMLError("Not Found")
        return "card"

    def nvmlDeviceGetMemoryBusWidth(self, handle: str) -> int:
        return 192

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 7501

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [types.SimpleNamespace(pid=7, usedGpuMemory=300 * MIB)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=None if pid == 9 else pid * MIB) for pid in (7, 8, 9, 10)]

    def nvmlSystemGetProcessName(self, pid: int) -> Any:
        if pid == 9:
            raise self.NVMLError("Not Found")
        return b"C:\\Games\\play.exe" if pid == 8 else f"/usr/bin/prog{pid}"


def test_nvidia_tells_speed_and_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    found, notes = nvidia.cards(("0000:01:00.0",))
    card = found["0000:01:00.0"]
    assert notes == ()
    assert card.bandwidth == pytest.approx(360e9, rel=0.001)  # NVIDIA's data sheet of the RTX 3060: 360 GB/s
    assert card.pcie is None
    assert nvml.calls == ["init", "shutdown"]
    told = "CUDA0: memory is held by prog10 (10, 10 MiB), play.exe (8, 8 MiB), prog7 (7, 7 MiB) and 1 more"
    assert nvidia.held("CUDA0", card.holders) == (told,)
    assert nvidia.held("CUDA0", ()) == ()


@pytest.mark.parametrize("bus_id", ["0000:01:00.0", "0000:99:00.0"])
def test_a_driver_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, bus_id: str) -> None:
    nvml = FakeNVML()
    nvml.broken = bus_id == "0000:01:00.0"
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    found, notes = nvidia.cards((bus_id,))
    assert found == {}
    assert len(notes) == 1
    assert nvidia.cards(()) == ({}, ())


def test_a_cuda_card_is_completed_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNVML())
    listed = ListedDevice("CUDA0", "NVIDIA GeForce RTX 3060", "gpu", "CUDA", 11 * GIB, 12 * GIB, "0000:01:00.0")
    monkeypatch.setattr(devices, "devices", lambda: (listed,))
    machine = probe.machine(bandwidth=False)
    assert machine.gpus[0].bandwidth == pytest.approx(360e9, rel=0.001)
    assert any("prog10" in note for note in machine.notes)
    assert machine.ram_bandwidth is None


def test_this_machine_lists_its_devices_with_addresses() -> None:
    cpu = next(device for device in devices.devices() if device.kind == "cpu")
    assert cpu.bus_id == ""
    assert 0 < cpu.free <= cpu.total == psutil.virtual_memory().total


def test_traps_are_named_where_they_lie() -> None:
    card, shared = Device("CUDA0", 8 * GIB, 8 * GIB), Device("Vulkan0", 8 * GIB, 8 * GIB, shares_ram=True)
    assert traps("Linux", "6.8.0-generic", (card,)) == ()
    assert ".wslconfig" in traps("Linux", "5.15.167.4-microsoft-standard-WSL2", ())[0]
    assert any("GGML_CUDA_NO_PINNED" in note for note in traps("Windows", "11", (card,)))
    assert traps("Windows", "11", (shared,)) == ()


def test_doctor_shows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = bandwidth.cache_file()
    bandwidth.remember(file, probe.machine(gpus=False, bandwidth=False).n_cores, 51.2e9)
    shown = a3b("doctor")
    assert shown.returncode == 0
    for word in ("cores", "RAM bandwidth", "51.2 GB/s", "swap", "locked memory", "llama-cpp-python"):
        assert word in shown.stdout
    told = json.loads(a3b("doctor", "--json").stdout)
    assert told["machine"]["ram_total"] > 0
    assert [line["what"] for line in told["lines"]][:2] == ["system", "a3b"]


def test_a_gpu_has_a_line() -> None:
    machine = probe.machine(gpus=False, bandwidth=False)
    card = Device("CUDA0", 12 * GIB, 11 * GIB, "RTX 3060", bandwidth=360e9, pcie=31.5e9)
    lines = {line.what: line for line in survey(type(machine)(GIB, GIB, 1, (card,))).lines}
    assert lines["CUDA0"].value == "RTX 3060: 12.00 GiB, 11.00 GiB free, 360 GB/s, PCIe 31.5 GB/s"
    assert "GPU" not in lines
    assert lines["RAM bandwidth"].value == "not measured"
