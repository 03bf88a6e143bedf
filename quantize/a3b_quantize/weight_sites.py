"""Which site of clip_bounds.bin a weight reads, and which it writes: how measured ranges are applied to tensors."""

from __future__ import annotations

import re

from a3b_gguf.clip_bounds import SHARED_DOWN_IN
from a3b_gguf.roles import layer_of

# (pattern of the name without "blk.N.", site of its input)
INPUTS: tuple[tuple[str, str], ...] = (
    (r"attn_(q|k|v)\.weight", "attn_in"),
    (r"attn_output\.weight", "attn_out_in"),
    (r"ssm_(alpha|beta|ba|in)\.weight", "ssm_in"),
    (r"ssm_out\.weight", "ssm_out_in"),
    (r"ffn_(gate|up|gate_up)_exps\.weight|ffn_(gate|up)_shexp\.weight|ffn_gate_inp(_shexp)?\.weight|ffn_(gate|up)\.weight", "ffn_in"),
    (r"ffn_down(_exps)?\.weight", "down_in"),
    (r"ffn_down_shexp\.weight", SHARED_DOWN_IN),
)
OUTPUTS = {"ffn_down.weight": "down_out", "ffn_down_exps.weight": "down_out", "attn_k.weight": "k_cache", "attn_v.weight": "v_cache"}
COMPILED = tuple((re.compile(r"blk\.\d+\." + f"({pattern})"), site) for pattern, site in INPUTS)
EITHER = re.compile(r"blk\.\d+\.attn_(qkv|gate)\.weight")


def input_site(name: str, recurrent: frozenset[int]) -> str | None:
    """The site whose values go into the weight `name`; None where none is measured. recurrent: the DeltaNet layers."""
    if EITHER.fullmatch(name):
        return "ssm_in" if layer_of(name) in recurrent else "attn_in"
    return next((site for pattern, site in COMPILED if pattern.fullmatch(name)), None)


def output_site(name: str) -> str | None:
    """The site that the weight `name` writes; None where none is measured."""
    return OUTPUTS.get(name.partition(".")[2].partition(".")[2])
