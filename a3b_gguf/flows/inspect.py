"""What a model file holds, counted from its header: sizes by role and by type, and what differs between two files."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from a3b_gguf.gguf_file import GGUFFile, read_gguf
from a3b_gguf.metadata import Field, SkippedArray
from a3b_gguf.roles import roles_of

LONG_VALUE = 72  # characters of a metadata value that fit into a table


@dataclass(frozen=True, slots=True)
class RoleRow:
    """All tensors of one role and type. bits: bits a weight, block scales included."""

    role: str
    type: str
    n_tensors: int
    n_weights: int
    n_bytes: int

    @property
    def bits(self) -> float:
        return 8 * self.n_bytes / self.n_weights


@dataclass(frozen=True, slots=True)
class TensorRow:
    name: str
    role: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A file's header in numbers. n_bytes: of the file; data_bytes: of its tensors."""

    path: Path
    version: int
    architecture: str
    n_bytes: int
    data_bytes: int
    n_weights: int
    n_tensors: int
    metadata: dict[str, str]
    roles: tuple[RoleRow, ...]
    tensors: tuple[TensorRow, ...]

    @property
    def bits(self) -> float:
        return 8 * self.data_bytes / max(self.n_weights, 1)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two files do not share; "" where a file lacks it."""

    what: str
    left: str
    right: str


def summarise(path: Path) -> Summary:
    """Reads the header of `path`. Raises BadInput when it is not a whole GGUF."""
    file = read_gguf(path)
    n_layer = int(file.hparam("block_count", 0)) - int(file.hparam("nextn_predict_layers", 0))
    roles = roles_of((info.name for info in file.tensors), n_layer or None)
    rows = tuple(TensorRow(info.name, roles[info.name], info.type.name, info.shape, info.nbytes) for info in file.tensors)
    return Summary(
        path=path,
        version=file.version,
        architecture=file.architecture,
        n_bytes=file.file_size,
        data_bytes=sum(row.n_bytes for row in rows),
        n_weights=sum(prod(row.shape) for row in rows),
        n_tensors=len(rows),
        metadata={key: shown(value) for key, value in file.metadata.items()},
        roles=by_role(rows),
        tensors=rows,
    )


def by_role(rows: tuple[TensorRow, ...]) -> tuple[RoleRow, ...]:
    """Rows grouped by role and type, the largest first."""
    groups: defaultdict[tuple[str, str], list[TensorRow]] = defaultdict(list)
    for row in rows:
        groups[row.role, row.type].append(row)
    grouped = (
        RoleRow(role, kind, len(group), sum(prod(r.shape) for r in group), sum(r.n_bytes for r in group))
        for (role, kind), group in groups.items()
    )
    return tuple(sorted(grouped, key=lambda row: (-row.n_bytes, row.role)))


def shown(value: Field) -> str:
    """A metadata value on one line; long arrays by their length, long text by its start."""
    if isinstance(value.value, SkippedArray):
        return f"[{value.value.count:,} x {value.item}]"
    text = repr(value.value) if value.kind == "str" else str(value.value)
    return text if len(text) <= LONG_VALUE else f"{text[:LONG_VALUE]}... ({len(text):,} characters)"


def differences(left: Path, right: Path) -> tuple[Difference, ...]:
    """What the headers of two files do not share: metadata first, then tensors by name, shape and type."""
    a, b = read_gguf(left, arrays=True), read_gguf(right, arrays=True)
    found = [
        Difference(key, _field(a, key), _field(b, key))
        for key in [*a.metadata, *(key for key in b.metadata if key not in a.metadata)]
        if a.metadata.get(key) != b.metadata.get(key)
    ]
    tensors_a, tensors_b = _table(a), _table(b)
    for name in [*tensors_a, *(name for name in tensors_b if name not in tensors_a)]:
        if tensors_a.get(name) != tensors_b.get(name):
            found.append(Difference(name, tensors_a.get(name, ""), tensors_b.get(name, "")))
    return tuple(found)


def _field(file: GGUFFile, key: str) -> str:
    field: Any = file.metadata.get(key)
    if field is None:
        return ""
    if field.kind == "arr" and len(field.value) > 16:
        return f"[{len(field.value):,} x {field.item}]"
    return shown(field)


def _table(file: GGUFFile) -> dict[str, str]:
    return {info.name: f"{info.type.name} {list(info.shape)}" for info in file.tensors}
