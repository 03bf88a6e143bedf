"""Qwen3-MoE (30B-A3B, Coder-30B-A3B): attention and routed experts in every layer, nothing else.

Porting table: class Qwen3MoeModel and what it inherits in llama.cpp conversion/qwen.py; shapes as in load_arch_tensors of
src/models/qwen3moe.cpp. Norms are used as they are stored, and the second one is ffn_norm here.
"""

from __future__ import annotations

from a3b_convert.archs.base import Arch, Dims, Either, Row, Table, in_block
from a3b_convert.archs.family import EMBEDDING, EXPERTS, IGNORE, OUTPUT, PREFIXES, ROUTER
from a3b_convert.config import Config
from a3b_convert.hparams import MAX_EXPERTS, MAX_LAYERS, text_metadata
from a3b_gguf.metadata import Metadata, u32

BLOCK: Table = (
    Row("{block}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden", f32=True),
    Row("{block}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", "q hidden"),
    Row("{block}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", "kv hidden"),
    Row("{block}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight", "kv hidden"),
    Row("{block}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight", "hidden q"),
    Row("{block}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight", "head", f32=True),
    Row("{block}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight", "head", f32=True),
    Row("{block}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight", "hidden", f32=True),
    ROUTER,
    EXPERTS,
)


def common_dims(config: Config) -> Dims:
    """The sizes of config.json. Raises BadInput for a variant that llama.cpp does not compute."""
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mlp_only_layers", [])
    config.expect("decoder_sparse_step", 1)
    config.expect("norm_topk_prob", True)
    config.expect("use_sliding_window", False)
    head, ff = config.count("head_dim"), config.count("moe_intermediate_size")
    return {
        "hidden": config.count("hidden_size"), "vocab": config.count("vocab_size"),
        "experts": config.count("num_experts", MAX_EXPERTS), "ff": ff, "gate_up": 2 * ff,
        "head": head, "q": config.count("num_attention_heads") * head, "kv": config.count("num_key_value_heads") * head,
    }  # fmt: skip


def dims(config: Config) -> Dims:
    config.need("norm_topk_prob", bool)  # absent means false to transformers; llama.cpp always normalizes
    return common_dims(config)


def rows(config: Config, dims: Dims, n_mtp: int) -> Table:
    table: list[Row | Either] = [EMBEDDING]
    for i in range(config.count("num_hidden_layers", MAX_LAYERS)):
        table += in_block(BLOCK, f"model.layers.{i}", i)
    tied = bool(config.may("tie_word_embeddings", bool, False))
    table.append(Row("model.norm.weight", "output_norm.weight", "hidden", f32=True))
    return [*table, Row(OUTPUT.source, OUTPUT.target, OUTPUT.shape, optional=tied)]


def metadata(config: Config, n_mtp: int, file_type: int) -> Metadata:
    out = text_metadata(config, "qwen3moe", config.count("num_hidden_layers"), file_type)
    return out | {"qwen3moe.expert_feed_forward_length": u32(config.count("moe_intermediate_size"))}


ARCH = Arch(
    hf_names=("Qwen3MoeForCausalLM",),
    gguf_name="qwen3moe",
    dims=dims,
    metadata=metadata,
    rows=rows,
    prefixes=PREFIXES,
    ignore=IGNORE,
)
