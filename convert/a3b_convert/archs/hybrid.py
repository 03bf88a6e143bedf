"""What qwen3next and qwen35moe share: DeltaNet layers with every fourth one full attention, a shared expert, one MTP block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from a3b_convert.archs.base import Dims, Either, Row, Table, in_block, plus_one
from a3b_convert.archs.family import EMBEDDING, GATED_ATTENTION, NEXTN, OUTPUT, SHARED_MOE
from a3b_convert.config import Config
from a3b_convert.hparams import MAX_EXPERTS, attention_interval, attention_layers, rope_dimensions, rope_parameters, text_metadata
from a3b_gguf.metadata import Metadata, array, u32

FINAL_NORM = Row("model.norm.weight", "output_norm.weight", "hidden", value=plus_one, f32=True)


def hybrid_dims(config: Config) -> Dims:
    """The sizes of config.json. Raises BadInput for a variant that llama.cpp does not compute."""
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


def hybrid_rows(config: Config, dims: Dims, n_mtp: int, deltanet: Callable[[Dims], Table]) -> Table:
    """Embedding, blocks in order, final norm, output, and the MTP block last: who does not load it need not map its bytes.

    deltanet: the rows of a DeltaNet layer, which are what the two architectures differ in.
    """
    full = attention_layers(config)
    table: list[Row | Either] = [EMBEDDING]
    for i, is_full in enumerate(full):
        table += in_block((*(GATED_ATTENTION if is_full else deltanet(dims)), *SHARED_MOE), f"model.layers.{i}", i)
    tied = bool(config.may("tie_word_embeddings", bool, False))
    table += [FINAL_NORM, Row(OUTPUT.source, OUTPUT.target, OUTPUT.shape, optional=tied)]
    for number in range(n_mtp):
        table += in_block((*GATED_ATTENTION, *SHARED_MOE, *NEXTN), f"mtp.layers.{number}", len(full) + number)
    return table


def hybrid_metadata(config: Config, arch: str, n_mtp: int, file_type: int, sections: Sequence[int] = ()) -> Metadata:
    """Keys and order: set_gguf_parameters of Qwen3NextModel and what it inherits in llama.cpp conversion/qwen.py."""
    full = attention_layers(config)
    out = text_metadata(config, arch, len(full) + n_mtp, file_type, sections)
    out[f"{arch}.expert_feed_forward_length"] = u32(config.count("moe_intermediate_size"))
    out[f"{arch}.expert_shared_feed_forward_length"] = u32(config.count("shared_expert_intermediate_size"))
    if n_mtp:
        out[f"{arch}.nextn_predict_layers"] = u32(n_mtp)
    out[f"{arch}.ssm.conv_kernel"] = u32(config.count("linear_conv_kernel_dim"))
    out[f"{arch}.ssm.state_size"] = u32(config.count("linear_key_head_dim"))
    out[f"{arch}.ssm.group_count"] = u32(config.count("linear_num_key_heads"))
    out[f"{arch}.ssm.time_step_rank"] = u32(config.count("linear_num_value_heads"))
    out[f"{arch}.ssm.inner_size"] = u32(config.count("linear_value_head_dim") * config.count("linear_num_value_heads"))
    out[f"{arch}.attention.recurrent_layers"] = array("bool", [not is_full for is_full in full] + [False] * n_mtp)
    out[f"{arch}.full_attention_interval"] = u32(attention_interval(config))
    out[f"{arch}.rope.dimension_count"] = u32(rope_dimensions(config, rope_parameters(config)))
    return out
