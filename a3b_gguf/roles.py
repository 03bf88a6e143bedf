"""What a tensor does in the model, told from its llama.cpp name: what recipes, the planner and `inspect` group by.

Names: src/llama-arch.cpp (LLM_TENSOR_NAMES) of llama.cpp. A name that no row knows has the role "other".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# (pattern of the name without "blk.N.", role); the first full match wins.
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"(per_layer_)?token_embd\.weight", "embedding"),
    (r"output\.(weight|bias)", "output"),
    (r"nextn\.(enorm|hnorm|shared_head_norm)\.weight", "norm"),
    (r"nextn\..*", "mtp"),
    (r".*_norm(_\d|_exps)?\.(weight|bias)", "norm"),
    (r"ffn_gate_inp(_shexp)?\.(weight|bias)|exp_probs_b(\.bias)?|ffn_exp_probs_b\.bias", "router"),
    (r"ffn_gate_exps\.(weight|bias)", "expert_gate"),
    (r"ffn_up_exps\.(weight|bias)", "expert_up"),
    (r"ffn_gate_up_exps\.(weight|bias)", "expert_gate_up"),
    (r"ffn_down_exps\.(weight|bias)", "expert_down"),
    (r"ffn_(gate|up|down)_shexp\.(weight|bias)", "shared_expert"),
    (r"ffn_(gate|up|down)\.(weight|bias)", "dense_ffn"),
    (r"ssm_conv1d\.(weight|bias)", "conv"),
    (r"ssm_(alpha|beta|ba|dt)\.(weight|bias)|ssm_(a|dt)", "gates"),
    (r"ssm_(in|out)\.(weight|bias)", "deltanet"),
    (r"attn_(qkv|gate)\.(weight|bias)", "attention"),  # DeltaNet's own where the layer is recurrent: see role_of
    (r"attn_(q|k|v|output|kv|q_a|q_b|k_b|v_b|kv_b|kv_a_mqa)\.(weight|bias)|attn_sinks\.weight", "attention"),
)
ROLES: tuple[str, ...] = (*dict.fromkeys(role for _, role in PATTERNS), "other")
EXPERT_ROLES = ("expert_gate", "expert_up", "expert_gate_up", "expert_down")

COMPILED = tuple((re.compile(pattern), role) for pattern, role in PATTERNS)
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def layer_of(name: str) -> int | None:
    """The layer in `blk.N.…`, or None for a tensor outside the blocks."""
    match = BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def role_of(name: str, n_layer: int | None = None, recurrent: bool = False) -> str:
    """The role of tensor `name`, one of ROLES.

    n_layer: layers of the trunk; with it every tensor of a block behind them has the role "mtp", without it an MTP block's
    tensors have the roles that the same names have in the trunk (a recipe treats them alike).
    recurrent: whether the tensor's layer is a DeltaNet layer, where attn_qkv and attn_gate are DeltaNet's projections.
    """
    match = BLOCK.fullmatch(name)
    if match and n_layer is not None and int(match[1]) >= n_layer:
        return "mtp"
    rest = match[2] if match else name
    for pattern, role in COMPILED:
        if pattern.fullmatch(rest):
            return "deltanet" if recurrent and rest.startswith(("attn_qkv.", "attn_gate.")) else role
    return "other"


def recurrent_layers(names: Iterable[str]) -> frozenset[int]:
    """Layers that hold state-space tensors: DeltaNet layers, told from the tensors and not from metadata that may be absent."""
    return frozenset(layer for name in names if ".ssm_" in name and (layer := layer_of(name)) is not None)


def roles_of(names: Iterable[str], n_layer: int | None = None) -> dict[str, str]:
    """The role of every tensor of a model."""
    names = list(names)
    recurrent = recurrent_layers(names)
    return {name: role_of(name, n_layer, layer_of(name) in recurrent) for name in names}
