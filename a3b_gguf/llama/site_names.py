"""Which nodes of llama.cpp's graph are which site of clip_bounds.bin."""

from __future__ import annotations

import re
from collections.abc import Container

# Node name -> site. Source: the `cb` calls of src/models/{qwen35moe,qwen3next,qwen3moe,llama}.cpp and src/llama-graph.cpp
NODES = {
    "attn_norm": "attn_in", "Kcur": "k_cache", "Vcur": "v_cache", "attn_gated": "attn_out_in", "kqv_out": "attn_out_in",
    "final_output": "ssm_out_in", "attn_post_norm": "ffn_in", "ffn_norm": "ffn_in", "l_out": "residual",
}  # fmt: skip
EXPERT_NODES = {f"ffn_moe_{act}": "down_in" for act in ("swiglu", "silu", "geglu", "gelu", "reglu", "relu")} | {"ffn_moe_down": "down_out"}
DENSE_NODES = {f"ffn_{act}": "down_in" for act in ("swiglu", "silu", "geglu", "gelu", "reglu", "relu")} | {"ffn_out": "down_out"}
TOPK = "ffn_moe_topk"
# Nodes whose name is first given to what goes into them, before RoPE: the last one of a batch is what the cache gets.
LAST_WINS = ("k_cache", "v_cache")
NODE = re.compile(r"(\w+)-(\d+)")


def site_of(node: str, recurrent: Container[int], routed: Container[int]) -> tuple[int, str] | None:
    """Layer and site (or TOPK) of a node, None when it is of no interest. recurrent, routed: layers with DeltaNet, with routed experts."""
    match = NODE.fullmatch(node)
    if not match:
        return None
    name, layer = match[1], int(match[2])
    found = NODES.get(name)
    if found is None:
        found = TOPK if name == TOPK else (EXPERT_NODES if layer in routed else DENSE_NODES).get(name)
    if found == "attn_in" and layer in recurrent:
        found = "ssm_in"
    return None if found is None else (layer, found)
