"""Qwen3-Next (80B-A3B, Coder-Next): as qwen35moe, but the DeltaNet projections are fused in the checkpoint and no V head is moved.

Porting table: class Qwen3NextModel in llama.cpp conversion/qwen.py; shapes as in load_arch_tensors of src/models/qwen3next.cpp.
config.json says nothing of the MTP block: only its tensors do.
"""

from __future__ import annotations

from a3b_convert.archs.base import Arch, Dims, Row, Table, negative_exp, plus_one
from a3b_convert.archs.family import CONV, IGNORE, MLX_CONV, PREFIXES
from a3b_convert.archs.hybrid import hybrid_dims, hybrid_metadata, hybrid_rows
from a3b_convert.config import Config
from a3b_convert.layout import Heads, unfused, without_middle
from a3b_gguf.metadata import Metadata


def deltanet(dims: Dims) -> Table:
    """Rows of a DeltaNet layer. in_proj_qkvz holds q, k, v and z of each K head in turn; in_proj_ba stays as it is."""
    heads, head = Heads(dims["k_heads"], dims["v_heads"] // dims["k_heads"]), dims["linear_head"]
    return (
        Row("{block}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden", value=plus_one, f32=True),
        Row("{block}.linear_attn.in_proj_qkvz.weight", "blk.{i}.attn_qkv.weight", "qkvz hidden", unfused(heads, head, "qkv")),
        Row("{block}.linear_attn.in_proj_qkvz.weight", "blk.{i}.attn_gate.weight", "qkvz hidden", unfused(heads, head, "z")),
        Row("{block}.linear_attn.in_proj_ba.weight", "blk.{i}.ssm_ba.weight", "ba hidden"),
        Row("{block}.linear_attn.conv1d.weight", "blk.{i}.ssm_conv1d.weight", CONV, without_middle, f32=True, also=MLX_CONV),
        Row("{block}.linear_attn.A_log", "blk.{i}.ssm_a", "v_heads", value=negative_exp, f32=True),
        Row("{block}.linear_attn.dt_bias", "blk.{i}.ssm_dt.bias", "v_heads", f32=True),
        Row("{block}.linear_attn.norm.weight", "blk.{i}.ssm_norm.weight", "linear_head", f32=True),
        Row("{block}.linear_attn.out_proj.weight", "blk.{i}.ssm_out.weight", "hidden v"),
    )


def dims(config: Config) -> Dims:
    found = hybrid_dims(config)
    return {**found, "qkvz": found["qkv"] + found["v"], "ba": 2 * found["v_heads"]}


def rows(config: Config, dims: Dims, n_mtp: int) -> Table:
    return hybrid_rows(config, dims, n_mtp, deltanet)


def metadata(config: Config, n_mtp: int, file_type: int) -> Metadata:
    return hybrid_metadata(config, "qwen3next", n_mtp, file_type)


ARCH = Arch(
    hf_names=("Qwen3NextForCausalLM",),
    gguf_name="qwen3next",
    dims=dims,
    metadata=metadata,
    rows=rows,
    prefixes=PREFIXES,
    ignore=IGNORE,
)
