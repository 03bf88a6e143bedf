"""Qwen3.5/3.6-MoE (35B-A3B): gated DeltaNet layers with every fourth one full attention, routed and shared experts, one MTP block.

Porting table: class Qwen3_5MoeTextModel and what it inherits in llama.cpp conversion/qwen.py; shapes as in load_arch_tensors of
src/models/qwen35moe.cpp.
"""

from __future__ import annotations

from a3b_convert.archs.base import Arch, Dims, Row, Table, negative_exp, plus_one
from a3b_convert.archs.family import CONV, IGNORE, MLX_CONV, PREFIXES
from a3b_convert.archs.hybrid import hybrid_dims, hybrid_metadata, hybrid_rows
from a3b_convert.config import Config
from a3b_convert.hparams import mrope_sections, rope_parameters
from a3b_convert.layout import Heads, tile_columns, tile_rows
from a3b_gguf.metadata import Metadata


def deltanet(dims: Dims) -> Table:
    """Rows of a DeltaNet layer. Its V heads are reordered: in rows, in columns of the output projection, in vectors."""
    heads, head, qk = Heads(dims["k_heads"], dims["v_heads"] // dims["k_heads"]), dims["linear_head"], dims["qk"]
    return (
        Row("{block}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden", value=plus_one, f32=True),
        Row("{block}.linear_attn.in_proj_qkv.weight", "blk.{i}.attn_qkv.weight", "qkv hidden", tile_rows(heads, head, first=qk)),
        Row("{block}.linear_attn.in_proj_z.weight", "blk.{i}.attn_gate.weight", "v hidden", tile_rows(heads, head)),
        Row("{block}.linear_attn.in_proj_a.weight", "blk.{i}.ssm_alpha.weight", "v_heads hidden", tile_rows(heads, 1)),
        Row("{block}.linear_attn.in_proj_b.weight", "blk.{i}.ssm_beta.weight", "v_heads hidden", tile_rows(heads, 1)),
        Row(
            "{block}.linear_attn.conv1d.weight",
            "blk.{i}.ssm_conv1d.weight",
            CONV,
            tile_rows(heads, head, first=qk),
            f32=True,
            also=MLX_CONV,
        ),
        Row("{block}.linear_attn.A_log", "blk.{i}.ssm_a", "v_heads", tile_columns(heads, 1), negative_exp, f32=True),
        Row("{block}.linear_attn.dt_bias", "blk.{i}.ssm_dt.bias", "v_heads", tile_columns(heads, 1), f32=True),
        Row("{block}.linear_attn.norm.weight", "blk.{i}.ssm_norm.weight", "linear_head", f32=True),
        Row("{block}.linear_attn.out_proj.weight", "blk.{i}.ssm_out.weight", "hidden v", tile_columns(heads, head)),
    )


def rows(config: Config, dims: Dims, n_mtp: int) -> Table:
    return hybrid_rows(config, dims, n_mtp, deltanet)


def metadata(config: Config, n_mtp: int, file_type: int) -> Metadata:
    return hybrid_metadata(config, "qwen35moe", n_mtp, file_type, mrope_sections(config, rope_parameters(config)))


ARCH = Arch(
    hf_names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf_name="qwen35moe",
    dims=hybrid_dims,
    metadata=metadata,
    rows=rows,
    prefixes=PREFIXES,
    ignore=IGNORE,
)
