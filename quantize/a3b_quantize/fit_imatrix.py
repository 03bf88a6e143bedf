"""Brings an importance matrix and a model together: each entry to its tensor, or a clear word about why not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from a3b_gguf.errors import BadInput
from a3b_gguf.roles import layer_of
from a3b_gguf.tensors import Model, TensorSource
from a3b_quantize.assign import EMBEDDINGS, n_dims
from a3b_quantize.imatrix import Imatrix, ImatrixEntry

SHOWN = 3  # names that are listed before "and n more"
# Gate and up read the same input, so an entry of one form serves the other. Part of a name -> what else it may be called
ALIASES = {
    "ffn_gate_exps": ("ffn_gate_up_exps",),
    "ffn_up_exps": ("ffn_gate_up_exps",),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}


@dataclass(frozen=True, slots=True)
class Fitted:
    """imatrix: its entries have the names and shapes of the model's tensors. notes: entries without a tensor, experts without data."""

    imatrix: Imatrix
    notes: tuple[str, ...]


def fit_imatrix(imatrix: Imatrix, model: Model) -> Fitted:
    """Gives each weight of `model` its entry, [n_mat, n_cols] and [n_mat] as the tensor has them. Fitting twice changes nothing.

    Raises BadInput when no entry belongs to the model, and for an entry whose length is not that of its tensor.
    """
    found: dict[str, ImatrixEntry] = {}
    used: set[str] = set()
    for tensor in model.tensors:
        name = next((name for name in names_of(tensor.name) if name in imatrix.entries), None)
        if name is None:
            continue
        used.add(name)
        if n_dims(tensor.shape) < 2:  # never quantized; llama.cpp collects for a gate of one row all the same
            continue
        entry = _fit(imatrix.entries[name], name, tensor)
        if entry is not None:
            found[tensor.name] = entry
    unused = [name for name in imatrix.entries if name not in used]
    if not used:
        raise BadInput(
            f"the importance matrix is of another model: none of its {len(unused)} entries ({listed(unused)}) is a tensor of this one",
            "give the one that was made for this model",
        )
    notes = [f"{len(unused)} entries of the importance matrix belong to no tensor: {listed(unused)}"] if unused else []
    fitted = replace(imatrix, entries=found)
    return Fitted(fitted, (*notes, *_empty_experts(fitted)))


def names_of(name: str) -> Iterator[str]:
    """The names that an entry for tensor `name` may have, the best first."""
    yield name
    part = name.split(".")[2] if name.count(".") > 2 else ""
    for other in ALIASES.get(part, ()):
        yield name.replace(part, other)


def without_entry(imatrix: Imatrix, names: Collection[str], n_layer: int | None = None) -> tuple[str, ...]:
    """A note about the tensors among `names` (those that will be quantized) that have no entry. The embeddings never have one."""
    missing = [name for name in names if name not in imatrix.entries and name not in EMBEDDINGS]
    if not missing:
        return ()
    extra = [name for name in missing if n_layer is not None and (layer_of(name) or 0) >= n_layer]
    why = " (llama.cpp's own tool does not run MTP blocks)" if len(extra) == len(missing) else ""
    return (f"{len(missing)} tensors have no entry in the importance matrix, every weight of them counts alike{why}: {listed(missing)}",)


def _fit(entry: ImatrixEntry, name: str, tensor: TensorSource) -> ImatrixEntry | None:
    n_cols, n_mat = tensor.shape[-1], prod(tensor.shape[:-2])
    if entry.sums.size != n_cols * n_mat:
        if tensor.name in EMBEDDINGS:  # collected with another output than this; llama-quantize passes over it too
            return None
        raise BadInput(
            f"entry {name} of the importance matrix has {entry.sums.size} values, {tensor.name} needs {n_mat} x {n_cols}",
            "it is of another model; give the one that was made for this model",
        )
    if entry.sums.shape == (n_mat, n_cols):
        return entry
    if entry.counts.size != 1:
        raise BadInput(
            f"entry {name} of the importance matrix has {entry.counts.size} matrices, {tensor.name} has {n_mat}",
            "it is of another model; give the one that was made for this model",
        )
    return ImatrixEntry(entry.sums.reshape(n_mat, n_cols), np.full(n_mat, entry.counts[0], np.float32))


def _empty_experts(imatrix: Imatrix) -> Iterator[str]:
    """What is said about experts that calibration never reached."""
    empty: Mapping[str, int] = {name: n for name, entry in imatrix.entries.items() if (n := int((entry.counts < 0.5).sum()))}
    if empty:
        worst = max(empty, key=lambda name: empty[name])
        of = imatrix.entries[worst].counts.size
        yield f"{len(empty)} entries have matrices that calibration never used, most of them {worst}: {empty[worst]} of {of}"
    if imatrix.is_legacy:
        yield "an imatrix.dat does not say how often each expert was used: rare ones count as much as others"


def listed(names: Collection[str], shown: int = SHOWN) -> str:
    """The first few names, and how many more."""
    first = ", ".join(list(names)[:shown])
    return first + (f" and {len(names) - shown} more" if len(names) > shown else "")
