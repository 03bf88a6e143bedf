"""What a model file holds, counted from its header: sizes by role and by type, and what differs between two files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.metadata import Field, Metadata, SkippedArray
from a3b_gguf.roles import roles_of
from a3b_gguf.split import read_parts, without_split

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
    """Reads the header of `path`, and of the other parts of a split model. Raises BadInput when it is not a whole GGUF."""
    file, *others = read_parts(path)
    infos = [info for part in (file, *others) for info in part.tensors]
    n_layer = int(file.hparam("block_count", 0)) - int(file.hparam("nextn_predict_layers", 0))
    roles = roles_of((info.name for info in infos), n_layer or None)
    rows = tuple(TensorRow(info.name, roles[info.name], info.type.name, info.shape, info.nbytes) for info in infos)
    return Summary(
        path=path,
        version=file.version,
        architecture=file.architecture,
        n_bytes=sum(part.file_size for part in (file, *others)),
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
    parts_a, parts_b = read_parts(left, arrays=True), read_parts(right, arrays=True)
    a, b = without_split(parts_a[0].metadata), without_split(parts_b[0].metadata)
    found = [
        Difference(key, _field(a, key), _field(b, key)) for key in [*a, *(key for key in b if key not in a)] if a.get(key) != b.get(key)
    ]
    tensors_a, tensors_b = _table(parts_a), _table(parts_b)
    for name in [*tensors_a, *(name for name in tensors_b if name not in tensors_a)]:
        if tensors_a.get(name) != tensors_b.get(name):
            found.append(Difference(name, tensors_a.get(name, ""), tensors_b.get(name, "")))
    return tuple(found)


def _field(metadata: Metadata, key: str) -> str:
    field = metadata.get(key)
    if field is None:
        return ""
    if field.kind == "arr" and len(field.value) > 16:
        return f"[{len(field.value):,} x {field.item}]"
    return shown(field)


def _table(parts: Sequence[GGUFFile]) -> dict[str, str]:
    return {info.name: f"{info.type.name} {list(info.shape)}" for part in parts for info in part.tensors}
