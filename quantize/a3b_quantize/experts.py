"""Fewer experts: `--experts N` changes how many a token uses, `--prune-experts FILE` takes whole experts out of the file.

The FILE is TOML (or the same as JSON, when its name ends in .json): for each layer, which experts go.

    [drop]
    "0" = [3, 17, 200]
    "1-39" = [5, 6, 7]          # layers as in a policy: "0-3,36-39", "-1", "first 4"

Experts are counted from 0, as the source has them. The format has one expert_count for the whole model, so every layer with experts,
that of an MTP block included, must lose the same number. Those that stay keep their order and are numbered anew.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.metadata import u32
from a3b_gguf.roles import layer_of
from a3b_gguf.tensors import GGMLType, Model, TensorSource
from a3b_quantize.fit_imatrix import names_of
from a3b_quantize.imatrix import Imatrix, ImatrixEntry
from a3b_quantize.rule import layer_set, subjects_of

OPTION = "--prune-experts"
HINT = 'write a table like [drop] with lines like "0-39" = [3, 17]'
# Tensors of a layer that hold something for each expert, on their first axis.
OF_EXPERTS = re.compile(r"blk\.\d+\.(ffn_(gate|up|gate_up|down)_exps\..+|ffn_gate_inp\.(weight|bias)|(ffn_)?exp_probs_b(\.bias)?)")
STACKS = re.compile(r"blk\.\d+\.ffn_(gate|up|gate_up|down)_exps\.weight")


@dataclass(frozen=True, slots=True)
class Pruned:
    """The model with fewer experts. kept: by layer, the experts that stay, as the source numbers them; n_before: how many it had."""

    model: Model
    kept: Mapping[int, tuple[int, ...]]
    n_before: int


class KeptExperts:
    """A TensorSource with some experts of another, whose first axis counts them."""

    def __init__(self, tensor: TensorSource, kept: Sequence[int]) -> None:
        self._tensor, self._kept = tensor, tuple(kept)
        self._height = prod(tensor.shape[1:-1])  # rows of an expert; a vector's experts are its columns

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._kept), *self._tensor.shape[1:])

    @property
    def type(self) -> GGMLType:
        return self._tensor.type

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        if len(self._tensor.shape) == 1:
            return self._tensor.rows(start, stop)[:, list(self._kept)]
        return np.concatenate([self._tensor.rows(*span) for span in self._spans(start, stop)])

    def raw(self, start: int, stop: int) -> bytes:
        if len(self._tensor.shape) == 1:
            items = np.frombuffer(self._tensor.raw(start, stop), np.dtype(("V", self.type.block_bytes)))
            return items[list(self._kept)].tobytes()
        return b"".join(bytes(self._tensor.raw(*span)) for span in self._spans(start, stop))

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The rows start..stop, counted over the experts that are kept, as ranges of the source's rows."""
        while start < stop:
            expert, row = divmod(start, self._height)
            count = min(stop - start, self._height - row)
            first = self._kept[expert] * self._height + row
            yield first, first + count
            start += count


def with_experts_used(model: Model, count: int) -> Model:
    """`model` with `count` experts for each token. Raises UsageError when it does not have so many."""
    n_expert = expert_count(model, "--experts")
    if not 1 <= count <= n_expert:
        raise UsageError(
            f"--experts: a token can use 1 to {n_expert} experts of this model, not {count}", f"write a number up to {n_expert}"
        )
    key = f"{model.architecture}.expert_used_count"
    before = model.metadata[key].value if key in model.metadata else "an unknown number"
    note = f"--experts: a token uses {count} of {n_expert} experts; in the source {before}"
    return replace(model, metadata={**model.metadata, key: u32(count)}, notes=(*model.notes, note))


def expert_count(model: Model, option: str) -> int:
    """How many experts a layer has. Raises UsageError for a model that has none."""
    found = model.metadata.get(f"{model.architecture}.expert_count")
    if found is None or not found.value:
        raise UsageError(f"{option}: the model has no experts", "leave it out")
    return int(found.value)


def prune_experts(model: Model, path: Path) -> Pruned:
    """`model` without the experts that the file at `path` names, and with the counts that this leaves.

    Raises BadInput for a file that does not say that, and where layers would keep different numbers or fewer than a token uses.
    """
    n_before = expert_count(model, OPTION)
    dropped = read_drops(path, model, n_before)
    layers = sorted({layer_of(tensor.name) or 0 for tensor in model.tensors if STACKS.fullmatch(tensor.name)})
    kept = {layer: tuple(i for i in range(n_before) if i not in dropped.get(layer, ())) for layer in layers}
    n_after = _agreed(path, model, kept, n_before)
    tensors = tuple(_without(tensor, kept, n_before) for tensor in model.tensors)
    arch = model.architecture
    metadata = {**model.metadata, f"{arch}.expert_count": u32(n_after)}
    note = f"{OPTION}: {n_before - n_after} of {n_before} experts left out of each of {len(layers)} layers, {n_after} stay"
    return Pruned(replace(model, metadata=metadata, tensors=tensors, notes=(*model.notes, note)), kept, n_before)


def read_drops(path: Path, model: Model, n_expert: int) -> dict[int, frozenset[int]]:
    """Which experts go, by layer. Raises BadInput that names the file and the line's key."""
    found: dict[int, frozenset[int]] = {}
    for key, experts in _table(path).items():
        where = f"{path}: drop {key!r}"
        if not isinstance(experts, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in experts):
            raise BadInput(f"{where} is {experts!r}, expected a list of numbers of experts", HINT)
        outside = [i for i in experts if not 0 <= i < n_expert]
        if outside:
            raise BadInput(f"{where}: there is no expert {outside[0]}, they are 0 to {n_expert - 1}", "look at the numbers")
        if len(set(experts)) < len(experts):
            raise BadInput(f"{where}: expert {max(experts, key=experts.count)} occurs twice", "name each once")
        for layer in layer_set(key, subjects_of(model), where):
            if layer in found:
                raise BadInput(f"{where}: layer {layer} was named before", "name each layer once")
            found[layer] = frozenset(experts)
    return found


def _table(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", HINT) from error
    except ValueError as error:  # of TOML, JSON or UTF-8
        raise BadInput(f"{path}: {error}", HINT) from error
    if not isinstance(data, dict) or set(data) != {"drop"} or not isinstance(data["drop"], dict) or not data["drop"]:
        raise BadInput(f"{path} must hold one table, drop, and nothing else", HINT)
    return data["drop"]


def _agreed(path: Path, model: Model, kept: Mapping[int, Sequence[int]], n_before: int) -> int:
    """How many experts each layer keeps. Raises BadInput when layers differ, UsageError when a token uses more."""
    counts = {layer: len(experts) for layer, experts in kept.items()}
    n_after = min(counts.values())
    most = max(counts, key=lambda layer: counts[layer])
    if counts[most] != n_after:
        least = min(counts, key=lambda layer: counts[layer])
        n_trunk = subjects_of(model).n_layer
        also = "; or leave the MTP block out with --no-mtp" if most >= n_trunk else ""
        raise BadInput(
            f"{path}: layer {least} would keep {n_after} experts and layer {most} {counts[most]}: the format has one expert_count for all",
            f"drop the same number in every layer, {n_before - n_after} as in layer {least}{also}",
        )
    arch = model.architecture
    used = model.metadata.get(f"{arch}.expert_used_count", u32(1)).value
    if n_after < used:
        raise UsageError(
            f"{OPTION}: {n_after} experts would stay and a token uses {used}", f"keep more, or add --experts {max(n_after, 1)}"
        )
    groups = model.metadata.get(f"{arch}.expert_group_count", u32(0)).value
    if groups > 1:
        raise UsageError(f"{OPTION}: the router chooses among {groups} groups of experts, which would get other members", "leave it out")
    return n_after


def _without(tensor: TensorSource, kept: Mapping[int, Sequence[int]], n_before: int) -> TensorSource:
    layer = layer_of(tensor.name)
    if layer is None or layer not in kept or not OF_EXPERTS.fullmatch(tensor.name):
        return tensor
    if tensor.shape[0] != n_before:
        raise BadInput(f"{OPTION}: {tensor.name} has shape {list(tensor.shape)}, expected {n_before} experts first", "inspect the source")
    return KeptExperts(tensor, kept[layer])


def pruned_imatrix(imatrix: Imatrix, pruned: Pruned) -> Imatrix:
    """An importance matrix of the whole model, or of the pruned one already, as one of the pruned model."""
    entries = dict(imatrix.entries)
    stacks = [tensor for tensor in pruned.model.tensors if STACKS.fullmatch(tensor.name)]
    n_cols = {name: tensor.shape[-1] for tensor in stacks for name in names_of(tensor.name)}
    for name, entry in imatrix.entries.items():
        layer = layer_of(name)
        if name in n_cols and layer is not None and layer in pruned.kept and entry.sums.size == pruned.n_before * n_cols[name]:
            kept = list(pruned.kept[layer])
            counts = entry.counts[kept] if entry.counts.size == pruned.n_before else entry.counts
            sums = entry.sums.reshape(pruned.n_before, -1)[kept]
            entries[name] = ImatrixEntry(sums if counts.size > 1 else sums.reshape(1, -1), counts)
    return replace(imatrix, entries=entries)
