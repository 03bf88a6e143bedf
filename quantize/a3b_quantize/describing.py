"""Metadata that describes the tensors: what a key must say for llama.cpp to load the file, read from the tensors themselves."""

from __future__ import annotations

import re
from typing import Any

from a3b_gguf.metadata import Field, SkippedArray
from a3b_gguf.roles import layer_of, recurrent_layers
from a3b_gguf.tensors import Model

TOKENS = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
# Keys that say how the file is laid out: a3b writes them itself.
LAYOUT = ("split.no", "split.count", "split.tensors.count", "general.alignment", "general.quantization_version")
TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
# Of the architecture: together they make up shapes, or choose what a layer is. No other value fits the tensors that are there.
FIXED = re.compile(
    r"attention\.(head_count|head_count_kv|key_length|value_length|recurrent_layers|key_length_mla|value_length_mla|kv_lora_rank|q_lora_rank)"
    r"|ssm\.\w+|full_attention_interval|leading_dense_block_count|expert_shared_count|expert_group_count"
)


def contradiction(model: Model, key: str, value: Any) -> str:
    """Why `key` cannot be `value` in a file with the tensors of `model`, or ""."""
    before = model.metadata.get(key)
    if before is not None and before.value == value:
        return ""
    if key in LAYOUT:
        return "a3b writes this key itself, it belongs to the layout of the file"
    if key == "general.architecture":
        return f"the tensors are those of {model.architecture}, by name and shape"
    if TOKEN_ID.fullmatch(key):
        return _token(model, value)
    arch, _, name = key.partition(".")
    if arch != model.architecture:
        return ""
    if name == "expert_used_count":
        return _experts_used(model, value)
    shown = from_tensors(model).get(name)
    if name == "block_count" and shown is not None and value != shown:
        return _layers(model, shown)
    if shown is not None and value != shown:
        return f"the tensors say {shown}"
    if FIXED.fullmatch(name) and shown is None:
        return _fixed(before)
    return ""


def from_tensors(model: Model) -> dict[str, int]:
    """What the shapes and names of the tensors say, by key without the architecture."""
    shapes = {re.sub(r"^blk\.\d+\.", "", tensor.name): tensor.shape for tensor in model.tensors}
    layers = [layer for tensor in model.tensors if (layer := layer_of(tensor.name)) is not None]
    with_mtp = {layer_of(tensor.name) for tensor in model.tensors if ".nextn.eh_proj." in tensor.name}
    found = {"block_count": 1 + max(layers), "nextn_predict_layers": len(with_mtp)} if layers else {}
    axes = (
        ("embedding_length", "token_embd.weight", -1), ("vocab_size", "token_embd.weight", -2),
        ("expert_count", "ffn_down_exps.weight", -3), ("expert_feed_forward_length", "ffn_down_exps.weight", -1),
        ("expert_shared_feed_forward_length", "ffn_down_shexp.weight", -1),
        ("feed_forward_length", "ffn_down.weight", -1),
    )  # fmt: skip
    return found | {key: shapes[name][axis] for key, name, axis in axes if name in shapes}


def _token(model: Model, value: Any) -> str:
    tokens = model.metadata.get(TOKENS[0])
    count = None if tokens is None else tokens.value.count if isinstance(tokens.value, SkippedArray) else len(tokens.value)
    return "" if count is None or 0 <= value < count else f"the vocabulary has the tokens 0 to {count - 1:,}"


def _experts_used(model: Model, value: Any) -> str:
    n_expert = from_tensors(model).get("expert_count", 0)
    return "" if isinstance(value, int) and 1 <= value <= n_expert else f"a token can use 1 to {n_expert} experts of this model"


def _layers(model: Model, n_blocks: int) -> str:
    """Why layers cannot be taken out, or claimed."""
    has = f"the file has {n_blocks} blocks"
    if not recurrent_layers(tensor.name for tensor in model.tensors):
        return f"{has}; layers cannot be pruned by their count, the tensors of the others would stay"
    return (
        f"{has}, and layers of a hybrid cannot be pruned: DeltaNet and attention layers take turns, and which is which is counted from the "
        "start, told in an array by layer, and followed by the MTP block; without a layer every later one would be read as the other kind"
    )


def _fixed(before: Field | None) -> str:
    has = "is not in the file" if before is None else f"is {before.value}"
    return f"the key {has}, it says what shape the tensors have or what a layer is, and they do not change"
