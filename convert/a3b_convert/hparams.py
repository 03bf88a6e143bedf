"""Metadata that every text architecture has, read from config.json in llama.cpp's words and order.

Source: TextModel.set_gguf_parameters in llama.cpp conversion/base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from a3b_convert.config import Config
from a3b_gguf.metadata import Metadata, array, f32, string, u32

# (key in rope_parameters, key in the file): optional numbers of YaRN
YARN = (
    ("extrapolation_factor", "yarn_ext_factor"),
    ("attention_factor", "yarn_attn_factor"),
    ("beta_fast", "yarn_beta_fast"),
    ("beta_slow", "yarn_beta_slow"),
)
MAX_LAYERS, MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS in llama-hparams.h
LAYER_TYPES = ("linear_attention", "full_attention")


def text_metadata(config: Config, arch: str, n_blocks: int, file_type: int, sections: Sequence[int] = ()) -> Metadata:
    """Sizes, attention, rope, experts and file type. n_blocks: with the MTP blocks. sections: four of M-RoPE, or none."""
    rope = rope_parameters(config)
    values = {
        "block_count": u32(n_blocks),
        "context_length": u32(config.count("max_position_embeddings")),
        "embedding_length": u32(config.count("hidden_size")),
        **_dense_width(config),
        "attention.head_count": u32(config.count("num_attention_heads")),
        "attention.head_count_kv": u32(config.count("num_key_value_heads")),
        **_rope_scaling(rope),
    }
    if sections:
        values["rope.dimension_sections"] = array("i32", list(sections))
    values |= {
        "rope.freq_base": f32(rope.need("rope_theta", float)),
        "attention.layer_norm_rms_epsilon": f32(config.need("rms_norm_eps", float)),
        "expert_count": u32(config.count("num_experts")),
        "expert_used_count": u32(config.count("num_experts_per_tok")),
        "attention.key_length": u32(config.count("head_dim")),
        "attention.value_length": u32(config.count("head_dim")),
    }
    n_used, n_experts = config.count("num_experts_per_tok"), config.count("num_experts")
    if n_used > n_experts:
        raise config.wrong(f"num_experts_per_tok is {n_used}, num_experts only {n_experts}")
    return {f"{arch}.{key}": value for key, value in values.items()} | {"general.file_type": u32(file_type)}


def _dense_width(config: Config) -> Metadata:
    """Of the feed-forward part that layers without experts would have; the family has no such layers, but some configs the number."""
    return {"feed_forward_length": u32(config.count("intermediate_size"))} if config.may("intermediate_size", int) is not None else {}


def rope_parameters(config: Config) -> Config:
    """The rope section under its new or its old name, with the keys that older files have at the top."""
    name = "rope_parameters" if config.may("rope_parameters", dict) else "rope_scaling"
    section = config.section(name)
    mirrored = {key: config.values[key] for key in ("rope_theta", "partial_rotary_factor") if config.values.get(key) is not None}
    kind = {"rope_type": section.values["type"]} if section.values.get("type") is not None else {}
    return replace(section, values={**mirrored, **kind, **section.values})


def _rope_scaling(rope: Config) -> Metadata:
    rope.expect("rope_type", "default", "yarn")
    if rope.values.get("rope_type") != "yarn":
        return {}
    found: Metadata = {
        "rope.scaling.type": string("yarn"),
        "rope.scaling.factor": f32(rope.need("factor", float)),
        "rope.scaling.original_context_length": u32(rope.count("original_max_position_embeddings")),
    }
    return found | {f"rope.scaling.{ours}": f32(rope.need(theirs, float)) for theirs, ours in YARN if rope.values.get(theirs) is not None}


def rope_dimensions(config: Config, rope: Config) -> int:
    """Columns of a head that are rotated: head_dim x partial_rotary_factor, which this family leaves at a quarter."""
    factor = rope.may("partial_rotary_factor", float, 0.25) or 0.25
    n_cols = config.count("head_dim")
    n_rot = int(n_cols * factor)
    if not 2 <= n_rot <= n_cols or n_rot % 2:
        raise config.wrong(f"partial_rotary_factor {factor} rotates {n_rot} of {n_cols} columns, expected an even number")
    return n_rot


def mrope_sections(config: Config, rope: Config) -> list[int]:
    """Pairs of columns for time, height, width and nothing, always four values, which llama.cpp requires.

    The three take turns, so the family's 32 pairs are [11, 11, 10], and other counts without mrope_section are divided likewise.
    Source: _Qwen35MRopeMixin in llama.cpp conversion/qwen.py. Raises BadInput for sections that leave out a pair: there transformers
    takes time, but ggml_mrope_cache_init in ggml-cpu/ops.cpp the fourth position, which is 0 in text.
    """
    pairs = rope_dimensions(config, rope) // 2
    turns = [len(range(first, pairs, 3)) for first in range(3)]
    found = rope.may("mrope_section", list)
    if not found:
        return [*turns, 0]
    if len(found) > 4 or not all(isinstance(n, int) and n >= 0 for n in found) or sum(found) != pairs:
        raise config.wrong(f"mrope_section is {found}, expected up to 4 numbers that add up to {pairs} pairs of rotated columns")
    if any(n < turn for n, turn in zip(found, turns, strict=False)) or len(found) < 3:
        raise config.wrong(f"mrope_section is {found}, expected {turns}: with others llama.cpp leaves some of the {pairs} pairs unrotated")
    return [*found, 0, 0, 0, 0][:4]


def attention_layers(config: Config) -> list[bool]:
    """For each trunk layer whether it is a full attention layer, else DeltaNet."""
    n_layers = config.count("num_hidden_layers", MAX_LAYERS)
    kinds = config.may("layer_types", list)
    if kinds is None:
        interval = attention_interval(config)
        return [(i + 1) % interval == 0 for i in range(n_layers)]
    if len(kinds) != n_layers:
        raise config.wrong(f"layer_types has {len(kinds)} entries, num_hidden_layers is {n_layers}")
    unknown = sorted({str(kind) for kind in kinds if kind not in LAYER_TYPES})
    if unknown:
        raise config.wrong(f"layer_types holds {', '.join(unknown)}, supported: {' and '.join(LAYER_TYPES)}")
    return [kind == "full_attention" for kind in kinds]


def attention_interval(config: Config) -> int:
    """Every how many layers one is full attention."""
    return config.count("full_attention_interval") if config.may("full_attention_interval", int) is not None else 4
