"""Leaves the multi-token-prediction blocks out of a model: `--no-mtp`."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf.metadata import Field, Metadata, u32
from a3b_gguf.roles import layer_of
from a3b_gguf.tensors import Model

# Keys that may hold one value a layer. Source: get_key_or_arr with n_layer_all in src/llama-model.cpp and src/models/*.cpp
PER_LAYER = (
    "attention.recurrent_layers", "attention.head_count", "attention.head_count_kv", "attention.sliding_window_pattern",
    "feed_forward_length", "expert_feed_forward_length",
)  # fmt: skip


def without_mtp(model: Model) -> Model:
    """`model` as a converter would have written it without its MTP blocks: no such tensors, and no claim to have them.

    A model that has none comes back as it is, with a note.
    """
    arch = model.architecture
    n_mtp = int(model.metadata.get(f"{arch}.nextn_predict_layers", u32(0)).value)
    n_trunk = int(model.metadata[f"{arch}.block_count"].value) - n_mtp
    kept = tuple(tensor for tensor in model.tensors if (layer := layer_of(tensor.name)) is None or layer < n_trunk)
    if not n_mtp:
        return replace(model, notes=(*model.notes, "--no-mtp: the model has no MTP block"))
    dropped = len(model.tensors) - len(kept)
    note = f"--no-mtp: {n_mtp} MTP block with {dropped} tensors left out"
    return Model(_trunk_metadata(model.metadata, arch, n_trunk), kept, (*model.notes, note))


def _trunk_metadata(metadata: Metadata, arch: str, n_trunk: int) -> Metadata:
    changed = {key: value for key, value in metadata.items() if key != f"{arch}.nextn_predict_layers"}
    changed[f"{arch}.block_count"] = u32(n_trunk)
    for name in PER_LAYER:
        found = changed.get(f"{arch}.{name}")
        if found is not None and found.kind == "arr":
            changed[f"{arch}.{name}"] = Field("arr", found.value[:n_trunk], found.item)
    return changed
