"""Qwen3.5/3.6-MoE (35B-A3B): gated DeltaNet layers with every fourth one full attention, routed and shared experts, one MTP block.

Porting table: class Qwen3_5MoeTextModel and what it inherits in llama.cpp conversion/qwen.py; shapes as in load_arch_tensors of
src/models/qwen35moe.cpp.
"""

from __future__ import annotations

from a3b_convert.archs.base import Arch, Dims, Either, Row, Table, in_block, negative_exp, plus_one
from a3b_convert.config import Config
from a3b_convert.hparams import (
    MAX_EXPERTS,
    attention_interval,
    attention_layers,
    mrope_sections,
    rope_dimensions,
    rope_parameters,
    text_metadata,
)
from a3b_convert.layout import Heads, half, tile_columns, tile_rows
from a3b_gguf.metadata import Metadata, array, u32

GLOBAL: Table = (Row("model.embed_tokens.weight", "token_embd.weight", "vocab hidden"),)
BEHIND: Table = (Row("model.norm.weight", "output_norm.weight", "hidden", value=plus_one, f32=True),)
OUTPUT = Row("lm_head.weight", "output.weight", "vocab hidden")

EXPERTS: tuple[Either, ...] = (
    (
        (
            Row("{block}.mlp.experts.gate_up_proj", "blk.{i}.ffn_gate_exps.weight", "experts gate_up hidden", half(0)),
            Row("{block}.mlp.experts.gate_up_proj", "blk.{i}.ffn_up_exps.weight", "experts gate_up hidden", half(1)),
        ),
        (
            Row("{block}.mlp.experts.{e}.gate_proj.weight", "blk.{i}.ffn_gate_exps.weight", "ff hidden"),
            Row("{block}.mlp.experts.{e}.up_proj.weight", "blk.{i}.ffn_up_exps.weight", "ff hidden"),
        ),
    ),
    (
        (Row("{block}.mlp.experts.down_proj", "blk.{i}.ffn_down_exps.weight", "experts hidden ff"),),
        (Row("{block}.mlp.experts.{e}.down_proj.weight", "blk.{i}.ffn_down_exps.weight", "hidden ff"),),
    ),
)
MOE: Table = (
    Row("{block}.post_attention_layernorm.weight", "blk.{i}.post_attention_norm.weight", "hidden", value=plus_one, f32=True),
    Row("{block}.mlp.gate.weight", "blk.{i}.ffn_gate_inp.weight", "experts hidden", f32=True),
    *EXPERTS,
    Row("{block}.mlp.shared_expert_gate.weight", "blk.{i}.ffn_gate_inp_shexp.weight", "1 hidden", f32=True),
    Row("{block}.mlp.shared_expert.gate_proj.weight", "blk.{i}.ffn_gate_shexp.weight", "shared_ff hidden"),
    Row("{block}.mlp.shared_expert.up_proj.weight", "blk.{i}.ffn_up_shexp.weight", "shared_ff hidden"),
    Row("{block}.mlp.shared_expert.down_proj.weight", "blk.{i}.ffn_down_shexp.weight", "hidden shared_ff"),
)
ATTENTION: Table = (
    Row("{block}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden", value=plus_one, f32=True),
    Row("{block}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", "q_and_gate hidden"),
    Row("{block}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", "kv hidden"),
    Row("{block}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight", "kv hidden"),
    Row("{block}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight", "hidden q"),
    Row("{block}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight", "head", value=plus_one, f32=True),
    Row("{block}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight", "head", value=plus_one, f32=True),
)
NEXTN: Table = (
    Row("mtp.fc.weight", "blk.{i}.nextn.eh_proj.weight", "hidden two_hidden"),
    Row("mtp.pre_fc_norm_embedding.weight", "blk.{i}.nextn.enorm.weight", "hidden", value=plus_one, f32=True),
    Row("mtp.pre_fc_norm_hidden.weight", "blk.{i}.nextn.hnorm.weight", "hidden", value=plus_one, f32=True),
    Row("mtp.norm.weight", "blk.{i}.nextn.shared_head_norm.weight", "hidden", value=plus_one, f32=True),
)


def deltanet(dims: Dims) -> Table:
    """Rows of a DeltaNet layer. Its V heads are reordered: in rows, in columns of the output projection, in vectors."""
    heads, head, qk = Heads(dims["k_heads"], dims["v_heads"] // dims["k_heads"]), dims["linear_head"], dims["qk"]
    return (
        Row("{block}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden", value=plus_one, f32=True),
        Row("{block}.linear_attn.in_proj_qkv.weight", "blk.{i}.attn_qkv.weight", "qkv hidden", tile_rows(heads, head, first=qk)),
        Row("{block}.linear_attn.in_proj_z.weight", "blk.{i}.attn_gate.weight", "v hidden", tile_rows(heads, head)),
        Row("{block}.linear_attn.in_proj_a.weight", "blk.{i}.ssm_alpha.weight", "v_heads hidden", tile_rows(heads, 1)),
        Row("{block}.linear_attn.in_proj_b.weight", "blk.{i}.ssm_beta.weight", "v_heads hidden", tile_rows(heads, 1)),
        Row("{block}.linear_attn.conv1d.weight", "blk.{i}.ssm_conv1d.weight", "qkv 1 kernel", tile_rows(heads, head, first=qk), f32=True),
        Row("{block}.linear_attn.A_log", "blk.{i}.ssm_a", "v_heads", tile_columns(heads, 1), negative_exp, f32=True),
        Row("{block}.linear_attn.dt_bias", "blk.{i}.ssm_dt.bias", "v_heads", tile_columns(heads, 1), f32=True),
        Row("{block}.linear_attn.norm.weight", "blk.{i}.ssm_norm.weight", "linear_head", f32=True),
        Row("{block}.linear_attn.out_proj.weight", "blk.{i}.ssm_out.weight", "hidden v", tile_columns(heads, head)),
    )


def dims(config: Config) -> Dims:
    """The sizes of config.json. Raises BadInput for a variant that llama.cpp's qwen35moe does not compute."""
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("attn_output_gate", True)
    config.expect("mlp_only_layers", [])
    config.expect("decoder_sparse_step", 1)
    config.expect("norm_topk_prob", True)
    config.expect("mtp_use_dedicated_embeddings", False)
    config.expect("use_sliding_window", False)
    k_heads, v_heads, linear_head = (config.count(f"linear_{key}") for key in ("num_key_heads", "num_value_heads", "key_head_dim"))
    config.expect("linear_value_head_dim", linear_head)  # llama.cpp has one ssm_d_state for both
    if v_heads % k_heads:
        raise config.wrong(f"linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}")
    hidden, head, ff = config.count("hidden_size"), config.count("head_dim"), config.count("moe_intermediate_size")
    q, kv = (config.count(f"num_{key}_heads") * head for key in ("attention", "key_value"))
    qk, v = 2 * k_heads * linear_head, v_heads * linear_head
    return {
        "hidden": hidden, "two_hidden": 2 * hidden, "vocab": config.count("vocab_size"),
        "experts": config.count("num_experts", MAX_EXPERTS), "ff": ff, "gate_up": 2 * ff,
        "shared_ff": config.count("shared_expert_intermediate_size"),
        "head": head, "q": q, "q_and_gate": 2 * q, "kv": kv,
        "k_heads": k_heads, "v_heads": v_heads, "linear_head": linear_head, "qk": qk, "v": v, "qkv": qk + v,
        "kernel": config.count("linear_conv_kernel_dim"),
    }  # fmt: skip


def rows(config: Config, dims: Dims, n_mtp: int) -> Table:
    """Embedding, blocks in order, final norm, output, and the MTP block last: who does not load it need not map its bytes."""
    full = attention_layers(config)
    table: list[Row | Either] = list(GLOBAL)
    for i, is_full in enumerate(full):
        table += in_block((*(ATTENTION if is_full else deltanet(dims)), *MOE), f"model.layers.{i}", i)
    tied = bool(config.may("tie_word_embeddings", bool, False))
    table += [*BEHIND, Row(OUTPUT.source, OUTPUT.target, OUTPUT.shape, optional=tied)]
    for number in range(n_mtp):
        table += in_block((*ATTENTION, *MOE, *NEXTN), f"mtp.layers.{number}", len(full) + number)
    return table


def metadata(config: Config, n_mtp: int, file_type: int) -> Metadata:
    """Keys and order: set_gguf_parameters of the classes named above."""
    full = attention_layers(config)
    rope = rope_parameters(config)
    key = "qwen35moe.{}".format
    out = text_metadata(config, "qwen35moe", len(full) + n_mtp, file_type, mrope_sections(config, rope))
    out[key("expert_feed_forward_length")] = u32(config.count("moe_intermediate_size"))
    out[key("expert_shared_feed_forward_length")] = u32(config.count("shared_expert_intermediate_size"))
    if n_mtp:
        out[key("nextn_predict_layers")] = u32(n_mtp)
    out[key("ssm.conv_kernel")] = u32(config.count("linear_conv_kernel_dim"))
    out[key("ssm.state_size")] = u32(config.count("linear_key_head_dim"))
    out[key("ssm.group_count")] = u32(config.count("linear_num_key_heads"))
    out[key("ssm.time_step_rank")] = u32(config.count("linear_num_value_heads"))
    out[key("ssm.inner_size")] = u32(config.count("linear_value_head_dim") * config.count("linear_num_value_heads"))
    out[key("attention.recurrent_layers")] = array("bool", [not is_full for is_full in full] + [False] * n_mtp)
    out[key("full_attention_interval")] = u32(attention_interval(config))
    out[key("rope.dimension_count")] = u32(rope_dimensions(config, rope))
    return out


ARCH = Arch(
    hf_names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf_name="qwen35moe",
    dims=dims,
    metadata=metadata,
    rows=rows,
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.mtp.", "mtp."),
    ),
    ignore=(("model.visual.*", "vision"), ("visual.*", "vision"), ("vision_tower.*", "vision"), ("*.rotary_emb.inv_freq", "rotary tables")),
)
