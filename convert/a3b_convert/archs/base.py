"""What an architecture is: a table of rows from source names to target names, applied so that each tensor is used exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_convert.checkpoint import listed
from a3b_convert.config import Config
from a3b_convert.layout import Layout, as_it_is, stack
from a3b_convert.placed import PlacedTensor, Value
from a3b_convert.safetensors_file import SafeTensor
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Metadata

Dims = Mapping[str, int]  # the sizes that shapes are written with, read from config.json


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the porting table.

    source, target: full names. {block}: "model.layers.3" in the trunk, "mtp.layers.0" in the MTP block; {i}: the GGUF block;
    {e}: the expert, whose tensors are stacked in numeric order.
    shape: of one source tensor, in names of Dims and numbers. layout moves numbers, value changes them; most rows have neither.
    f32: llama.cpp wants it in F32. optional: the checkpoint may lack it. also: another shape whose numbers lie in the same order.
    """

    source: str
    target: str
    shape: str
    layout: Layout = as_it_is
    value: Value | None = None
    f32: bool = False
    optional: bool = False
    also: str = ""


# Rows that stand for each other: the group is used whose tensors are there and have the shapes that it asks for.
Either = tuple[tuple[Row, ...], ...]
Table = Sequence[Row | Either]


@dataclass(frozen=True, slots=True)
class Arch:
    """An architecture. hf_names: classes in config.json. gguf_name: general.architecture.

    dims: reads and checks config.json, and names every size that the rows' shapes use.
    metadata: the architecture's own keys, in llama.cpp's order; it is told how many MTP blocks are written and the file type.
    rows: the whole table for this many MTP blocks, {block} and {i} filled in.
    prefixes: (how some checkpoints begin a name, how the rows begin it). ignore: (pattern, what such tensors are).
    """

    hf_names: tuple[str, ...]
    gguf_name: str
    dims: Callable[[Config], Dims]
    metadata: Callable[[Config, int, int], Metadata]
    rows: Callable[[Config, Dims, int], Table]
    prefixes: tuple[tuple[str, str], ...]
    ignore: tuple[tuple[str, str], ...]


def plus_one(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Norms are stored as w and used as 1 + w."""
    return rows + np.float32(1)


def negative_exp(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """A_log -> A = -exp(A_log), which is what ssm_a holds; in float64, since exp() in float32 is off by a unit on some machines."""
    return -np.exp(rows.astype(np.float64)).astype(np.float32)


def in_block(rows: Table, block: str, i: int) -> Iterator[Row | Either]:
    """The rows with {block} and {i} filled in."""

    def fill(row: Row) -> Row:
        return replace(row, source=row.source.replace("{block}", block), target=row.target.replace("{i}", str(i)))

    for row in rows:
        yield fill(row) if isinstance(row, Row) else tuple(tuple(map(fill, group)) for group in row)


def count_mtp_blocks(names: Iterable[str]) -> int:
    """MTP blocks that the checkpoint holds, told from its tensors and never from config.json alone."""
    mtp = [name.split(".") for name in names if name.startswith("mtp.")]
    numbers = [int(parts[2]) for parts in mtp if len(parts) > 3 and parts[1] == "layers" and parts[2].isdecimal()]
    return max(numbers, default=0) + 1 if mtp else 0


def rename(arch: Arch, tensors: Mapping[str, SafeTensor]) -> dict[str, SafeTensor]:
    """The tensors under the names that the rows use. Raises BadInput when two tensors would get one name."""
    renamed: dict[str, SafeTensor] = {}
    for name, tensor in tensors.items():
        for theirs, ours in arch.prefixes:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        if name in renamed:
            raise BadInput(
                f"{tensor.file.path}: tensors {renamed[name].name} and {tensor.name} are both {name}",
                "keep the one that belongs to this checkpoint",
            )
        renamed[name] = tensor
    return renamed


def apply(
    arch: Arch, table: Table, dims: Dims, folder: Path, tensors: Mapping[str, SafeTensor]
) -> tuple[list[PlacedTensor], dict[str, list[str]]]:
    """Every row's tensor, in the table's order, and the ignored tensors' names by what they are.

    Raises BadInput that names the tensors when a required row finds no source, when a source matches no row, when a shape is not
    what config.json asks for; RuntimeError when two rows have one target, which is a mistake in the table.
    """
    placed: list[PlacedTensor] = []
    missing: list[str] = []
    used: set[str] = set()
    for row in _chosen(table, dims, tensors, folder):
        names = _sources(row, dims)
        used.update(names)
        absent = [name for name in names if name not in tensors]
        if absent:
            missing += [] if row.optional and len(absent) == len(names) else absent
            continue
        placed.append(_place(row, dims, [tensors[name] for name in names]))
    ignored: dict[str, list[str]] = {}
    for name in sorted(tensors.keys() - used):
        what = next((what for pattern, what in arch.ignore if fnmatchcase(name, pattern)), "")
        ignored.setdefault(what, []).append(name)
    _refuse_mismatch(arch, folder, missing, [tensors[name].name for name in ignored.pop("", [])])
    twice = [name for name, count in Counter(tensor.name for tensor in placed).items() if count > 1]
    if twice:
        raise RuntimeError(f"archs/{arch.gguf_name}.py writes {listed(twice)} twice")
    return placed, ignored


def _chosen(table: Table, dims: Dims, tensors: Mapping[str, SafeTensor], folder: Path) -> Iterator[Row]:
    for row in table:
        yield from [row] if isinstance(row, Row) else _choose(row, dims, tensors, folder)


def _choose(groups: Either, dims: Dims, tensors: Mapping[str, SafeTensor], folder: Path) -> tuple[Row, ...]:
    """The group of which most rows find a source, and of several such the one whose shapes fit.

    Raises BadInput with all readings when the tensors are whole and more than one fits: the numbers cannot tell.
    """
    there = {row: any(name in tensors for name in _sources(row, dims)) for row in {row for group in groups for row in group}}
    lacks = {group: sum(not there[row] for row in group) for group in groups}
    fewest = min(lacks.values())
    nearest = [group for group in groups if lacks[group] == fewest]
    fitting = [group for group in nearest if all(_fits(row, dims, tensors) for row in group)]
    if len(fitting) < 2 or fewest:
        return (fitting or nearest)[0]
    readings = " or as ".join(", ".join(f"{row.target} from [{_asked(row, dims)}]" for row in group) for group in fitting)
    name = fitting[0][0].source
    raise BadInput(
        f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, which can be read as {readings}",
        "take a checkpoint with one tensor for each expert, or one whose down_proj is packed as well: its shape decides",
    )


def _fits(row: Row, dims: Dims, tensors: Mapping[str, SafeTensor]) -> bool:
    return all(tensors[name].shape == shape_of(row.shape, dims) for name in _sources(row, dims) if name in tensors)


def shape_of(words: str, dims: Dims) -> tuple[int, ...]:
    """A row's shape in numbers."""
    return tuple(int(word) if word.isdecimal() else dims[word] for word in words.split())


def _asked(row: Row, dims: Dims) -> str:
    """A row's shape in words and numbers: "experts 4, ff 32"."""
    words = zip(row.shape.split(), shape_of(row.shape, dims), strict=True)
    return ", ".join(word if word.isdecimal() else f"{word} {size}" for word, size in words)


def _sources(row: Row, dims: Dims) -> list[str]:
    return [row.source.replace("{e}", str(e)) for e in range(dims["experts"])] if "{e}" in row.source else [row.source]


def _place(row: Row, dims: Dims, parts: list[SafeTensor]) -> PlacedTensor:
    wanted = shape_of(row.shape, dims)
    if row.also:
        parts = [replace(part, shape=wanted) if part.shape == shape_of(row.also, dims) else part for part in parts]
    for part in parts:
        if part.shape != wanted:
            raise BadInput(
                f"{part.file.path}: tensor {part.name} has shape {list(part.shape)}, config.json asks for [{_asked(row, dims)}]",
                "config.json and the weights are not of one model, or the weights are packed or transposed in a way that is not known",
            )
        if part.type != parts[0].type:
            both = f"{parts[0].name} ({parts[0].dtype}) and {part.name} ({part.dtype})"
            raise BadInput(f"{part.file.path}: tensors {both} become one, but differ in dtype", "the checkpoint is damaged")
    layout = stack if "{e}" in row.source else row.layout
    return PlacedTensor(row.target, parts, layout(wanted, len(parts)), row.value, row.f32)


def _refuse_mismatch(arch: Arch, folder: Path, missing: list[str], left_over: list[str]) -> None:
    said = []
    if missing:
        said.append(f"{len(missing)} tensors of {arch.gguf_name} are missing: {listed(missing)}")
    if left_over:
        said.append(f"{len(left_over)} tensors match no row of {arch.gguf_name}: {listed(left_over)}")
    if said:
        raise BadInput(f"{folder}: {'; '.join(said)}", "the checkpoint is incomplete, or config.json is of another model")
