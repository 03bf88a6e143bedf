"""Limits that a container or a service manager sets, of both versions of Linux's control groups. Nothing is found elsewhere.

A limit holds for a group and all groups below it, so the least on the way up to the root counts.
Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 says "no limit" by a number close to 2^63.
NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """total: bytes that all processes of the group may hold together; used: those that are taken and cannot be dropped."""

    total: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.total - self.used)


def memory_limit(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> MemoryLimit | None:
    """The limit that leaves least, or None where there is none or it cannot be read."""
    found = [
        limit
        for folder, version in _folders(proc, mount, "memory")
        if (limit := _limit_v2(folder) if version == 2 else _limit_v1(folder)) is not None
    ]
    return min(found, key=lambda limit: limit.left, default=None)


def cpu_limit(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores' time the group may take (4.0: four), or None."""
    shares = [_quota_v2(folder) if version == 2 else _quota_v1(folder) for folder, version in _folders(proc, mount, "cpu")]
    return min((share for share in shares if share is not None), default=None)


def _folders(proc: Path, mount: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The group's folder and those above it, with the version. In a container the path may lie outside of what is mounted."""
    for line in _read(proc).splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers == "":
            root, version = mount, 2
        elif controller in controllers.split(","):
            root, version = mount / controller, 1
        else:
            continue
        inside = root / path.lstrip("/")
        while True:
            if inside.is_dir():
                yield inside, version
            if inside == root:
                break
            inside = inside.parent


def _limit_v2(folder: Path) -> MemoryLimit | None:
    total, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    return None if total is None or used is None else MemoryLimit(total, max(0, used - _stat(folder, "inactive_file")))


def _limit_v1(folder: Path) -> MemoryLimit | None:
    total, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if total is None or used is None or total >= NO_LIMIT:
        return None
    return MemoryLimit(total, max(0, used - _stat(folder, "total_inactive_file")))


def _stat(folder: Path, name: str) -> int:
    """Bytes of files that the group has read and that can be dropped at once."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(file: Path) -> int | None:
    """The number in `file`; None for "max", for -1 and for a file that is not there."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not Linux, not mounted, or not ours to read: then nothing is known of a limit
        return ""
