"""Small random checkpoints with the true structure of each architecture, in every form that is met in the wild.

`write_checkpoint(folder, form=Form(...))` writes config.json, tokenizer files and safetensors. The same `sizes` and `seed` give the same
weights in every form, so that forms can be compared. Files are written by the safetensors library, never by our own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

Weights = dict[str, NDArray[np.float32]]
PLAIN_NORMS = ("qwen3moe", "qwen3vlmoe")  # norms used as they are stored, attention and experts only
CLASSES = {"qwen35moe": "Qwen3_5MoeForCausalLM", "qwen3next": "Qwen3NextForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
NESTED = {
    "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"), "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "deepstack_visual_indexes": [0]}
Edit = Callable[[Weights, dict[str, Any]], object]
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# dtype of a checkpoint -> (name that safetensors takes, how float32 becomes it)
DTYPES: dict[str, tuple[str, Callable[[NDArray[np.float32]], NDArray[Any]]]] = {
    "BF16": ("bfloat16", lambda x: ((np.ascontiguousarray(x).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)),
    "F16": ("float16", lambda x: x.astype(np.float16)),
    "F32": ("float32", np.ascontiguousarray),
    "F64": ("float64", lambda x: x.astype(np.float64)),
    "U8": ("uint8", lambda x: np.zeros(x.shape, np.uint8)),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths and counts. The defaults make 100,000 weights; `hidden=256, ff=256` makes rows that K-quants accept."""

    hidden: int = 64
    n_head: int = 2
    n_kv: int = 1
    head: int = 32
    k_heads: int = 2
    v_heads: int = 4
    linear_head: int = 16
    kernel: int = 4
    n_layer: int = 4
    n_expert: int = 4
    n_used: int = 2
    ff: int = 32
    shared_ff: int = 32
    vocab: int = 320


@dataclass(frozen=True, slots=True)
class Form:
    """How the same weights are laid out. packed, mtp_packed: experts of the trunk, of the MTP block. shards: 1 writes model.safetensors.

    arch: the architecture, whose weights differ. turned: packed experts are transposed. yarn: the context is stretched (qwen3moe only).
    mlx: as mlx-lm saves it: names of experts, convolutions' shape, norms with their 1 added; no MTP block.
    """

    arch: str = "qwen35moe"
    turned: bool = False
    mlx: bool = False
    yarn: bool = False
    packed: bool = True
    mtp: bool = True
    mtp_packed: bool = True
    nested: bool = False
    tied: bool = False
    vision: bool = False
    shards: int = 1
    index: bool = True
    dtype: str = "BF16"


def write_checkpoint(folder: Path, form: Form = Form(), sizes: Sizes = Sizes(), seed: int = 0, edit: Edit | None = None) -> Path:
    """A checkpoint in `folder`, which is made. edit(weights, config): changes both, under their final names, before they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    values, config = in_form(weights(sizes, seed, form.mtp, form.arch), form), config_json(sizes, form)
    if edit:
        edit(values, config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(sizes.vocab, QWEN35 if form.arch == "qwen35moe" else QWEN2)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_shards(folder, values, form)
    return folder


def write_shards(folder: Path, values: Weights, form: Form) -> None:
    """The weights as one file, or as `form.shards` files with or without an index."""
    if form.shards == 1:
        save(folder / "model.safetensors", values, form.dtype)
        return
    names = list(values)
    weight_map: dict[str, str] = {}
    for number in range(form.shards):
        part = {name: values[name] for name in names[number :: form.shards]}
        file = f"model-{number + 1:05d}-of-{form.shards:05d}.safetensors"
        save(folder / file, part, form.dtype)
        weight_map |= dict.fromkeys(part, file)
    if form.index:
        write_index(folder, weight_map)


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))


def save(path: Path, values: Weights, dtype: str = "BF16", others: Mapping[str, str] | None = None) -> None:
    """One safetensors file. others: tensors of another dtype than `dtype`."""
    stored = {
        name: (DTYPES[kind][0], DTYPES[kind][1](value)) for name, value in values.items() if (kind := (others or {}).get(name, dtype))
    }
    spec = {
        name: TensorSpec(dtype=kind, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, (kind, array) in stored.items()
    }
    serialize_file(spec, path, {"format": "pt"})


def weights(sizes: Sizes, seed: int = 0, mtp: bool = True, arch: str = "qwen35moe") -> Weights:
    """Every tensor under its flat name, experts packed. Each has a generator of its own: leaving one out changes no other."""

    def value(name: str, *shape: int) -> NDArray[np.float32]:
        rng = np.random.default_rng([seed, *name.encode()])
        drawn = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("A_log"):
            return np.log(1 + 15 * rng.random(shape)).astype(np.float32)
        scale = 0.1 if len(shape) == 1 else 1 / np.sqrt(shape[-1])
        plain_norm = name.endswith("norm.weight") and arch in PLAIN_NORMS
        return (1 if plain_norm or name.endswith("linear_attn.norm.weight") else 0) + drawn * np.float32(scale)

    shapes = {name: shape for name, shape in all_shapes(sizes, arch).items() if mtp or not name.startswith("mtp.")}
    return {name: bf16_rounded(value(name, *shape)) for name, shape in shapes.items()}


def bf16_rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values that bf16 holds, so that every dtype of a checkpoint holds the same ones."""
    return (DTYPES["BF16"][1](x).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)


def all_shapes(s: Sizes, arch: str = "qwen35moe") -> dict[str, tuple[int, ...]]:
    """Shapes by flat name. Source: transformers/models; it lacks the MTP block, published files of the hybrids have it."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for i in range(s.n_layer):
        if arch in PLAIN_NORMS:
            layer = attention(s, gated=False) | moe(s, shared=False)
        elif (i + 1) % 4 == 0:
            layer = attention(s) | moe(s)
        else:
            layer = (deltanet(s) if arch == "qwen35moe" else fused_deltanet(s)) | moe(s)
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    out |= {"model.norm.weight": (s.hidden,), "lm_head.weight": (s.vocab, s.hidden)}
    if arch in PLAIN_NORMS:
        return out
    out |= {f"mtp.layers.0.{name}": shape for name, shape in (attention(s) | moe(s)).items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return out | {"mtp.fc.weight": (s.hidden, 2 * s.hidden)} | {f"mtp.{norm}.weight": (s.hidden,) for norm in norms}


def deltanet(s: Sizes) -> dict[str, tuple[int, ...]]:
    qk, v = 2 * s.k_heads * s.linear_head, s.v_heads * s.linear_head
    return {
        "input_layernorm.weight": (s.hidden,),
        "linear_attn.in_proj_qkv.weight": (qk + v, s.hidden),
        "linear_attn.in_proj_z.weight": (v, s.hidden),
        "linear_attn.in_proj_a.weight": (s.v_heads, s.hidden),
        "linear_attn.in_proj_b.weight": (s.v_heads, s.hidden),
        "linear_attn.conv1d.weight": (qk + v, 1, s.kernel),
        "linear_attn.A_log": (s.v_heads,),
        "linear_attn.dt_bias": (s.v_heads,),
        "linear_attn.norm.weight": (s.linear_head,),
        "linear_attn.out_proj.weight": (s.hidden, v),
    }


def fused_deltanet(s: Sizes) -> dict[str, tuple[int, ...]]:
    """As Qwen3-Next has it: q, k, v, z in one matrix, b and a in another."""
    qk, v = 2 * s.k_heads * s.linear_head, s.v_heads * s.linear_head
    plain = {name: shape for name, shape in deltanet(s).items() if ".in_proj_" not in name}
    return plain | {"linear_attn.in_proj_qkvz.weight": (qk + 2 * v, s.hidden), "linear_attn.in_proj_ba.weight": (2 * s.v_heads, s.hidden)}


def attention(s: Sizes, gated: bool = True) -> dict[str, tuple[int, ...]]:
    q, kv = s.n_head * s.head, s.n_kv * s.head
    return {
        "input_layernorm.weight": (s.hidden,),
        "self_attn.q_proj.weight": (2 * q if gated else q, s.hidden),
        "self_attn.k_proj.weight": (kv, s.hidden),
        "self_attn.v_proj.weight": (kv, s.hidden),
        "self_attn.o_proj.weight": (s.hidden, q),
        "self_attn.q_norm.weight": (s.head,),
        "self_attn.k_norm.weight": (s.head,),
    }


def moe(s: Sizes, shared: bool = True) -> dict[str, tuple[int, ...]]:
    routed: dict[str, tuple[int, ...]] = {
        "post_attention_layernorm.weight": (s.hidden,),
        "mlp.gate.weight": (s.n_expert, s.hidden),
        "mlp.experts.gate_up_proj": (s.n_expert, 2 * s.ff, s.hidden),
        "mlp.experts.down_proj": (s.n_expert, s.hidden, s.ff),
    }
    if not shared:
        return routed
    return routed | {
        "mlp.shared_expert_gate.weight": (1, s.hidden),
        "mlp.shared_expert.gate_proj.weight": (s.shared_ff, s.hidden),
        "mlp.shared_expert.up_proj.weight": (s.shared_ff, s.hidden),
        "mlp.shared_expert.down_proj.weight": (s.hidden, s.shared_ff),
    }


def in_form(values: Weights, form: Form) -> Weights:
    """The weights under the names that the form has."""
    out: Weights = {}
    for name, value in values.items():
        if form.tied and name == "lm_head.weight":
            continue
        packed = form.mtp_packed if name.startswith("mtp.") else form.packed
        for final, part in laid_out(name, value, form, packed).items():
            inner = "language_model.model." if form.mlx else "model.language_model."
            out[final.replace("model.", inner, 1) if form.nested and final.startswith("model.") else final] = part
    if form.vision:
        out["model.visual.patch_embed.proj.weight"] = np.zeros((4, 3, 2, 2, 2), np.float32)
        out["model.visual.merger.norm.weight"] = np.zeros(4, np.float32)
    return out


def laid_out(name: str, value: NDArray[np.float32], form: Form, packed: bool) -> Weights:
    """One tensor as the form has it: by its own name, transposed, or as one for each expert."""
    if form.mlx:
        return as_mlx(name, value, form.arch)
    if form.turned and ".mlp.experts." in name:
        return {name: np.ascontiguousarray(value.transpose(0, 2, 1))}
    return {name: value} if packed else per_expert(name, value)


def as_mlx(name: str, value: NDArray[np.float32], arch: str) -> Weights:
    """One tensor as sanitize in mlx_lm/models/qwen3_5.py and its kin leaves it."""
    base, half = name.partition("experts.")[0] + "switch_mlp.", value.shape[1] // 2 if value.ndim > 1 else 0
    if name.endswith("experts.gate_up_proj"):
        parts = {"gate_proj": value[:, :half], "up_proj": value[:, half:]}
        return {f"{base}{part}.weight": np.ascontiguousarray(both) for part, both in parts.items()}
    if name.endswith("experts.down_proj"):
        return {f"{base}down_proj.weight": value}
    if name.endswith("conv1d.weight"):
        return {name: np.ascontiguousarray(np.moveaxis(value, 2, 1))}
    return {name: bf16_rounded(value + 1) if arch not in PLAIN_NORMS and is_zero_centred(name) else value}


def is_zero_centred(name: str) -> bool:
    """Whether a tensor is a norm that the hybrids use as 1 + w."""
    return "norm" in name and not name.endswith("linear_attn.norm.weight")


def per_expert(name: str, value: NDArray[np.float32]) -> Weights:
    """A packed expert tensor as one tensor for each expert; any other as it is."""
    if name.endswith("experts.gate_up_proj"):
        base, half = name.removesuffix("gate_up_proj"), value.shape[1] // 2
        halves = {"gate_proj": value[:, :half], "up_proj": value[:, half:]}
    elif name.endswith("experts.down_proj"):
        base, halves = name.removesuffix("down_proj"), {"down_proj": value}
    else:
        return {name: value}
    return {f"{base}{e}.{kind}.weight": np.ascontiguousarray(part[e]) for kind, part in halves.items() for e in range(len(value))}


def config_json(s: Sizes, form: Form) -> dict[str, Any]:
    """config.json, flat or with a text_config under the multimodal class."""
    own = {"qwen35moe": config_35, "qwen3next": config_next, "qwen3moe": config_moe, "qwen3vlmoe": config_vl}[form.arch]
    text = {**common_config(s, form), **own(s, form)}
    if not form.nested:
        return {"architectures": [CLASSES[form.arch]], **text}
    name, model_type = NESTED[form.arch]
    vision = {"depth": 1} if form.arch == "qwen35moe" else VISION | {"out_hidden_size": s.hidden}
    root = {"architectures": [name], "model_type": model_type, "tie_word_embeddings": form.tied}
    return {**root, "text_config": text, "vision_config": vision}


def common_config(s: Sizes, form: Form) -> dict[str, Any]:
    return {
        "hidden_act": "silu", "hidden_size": s.hidden, "vocab_size": s.vocab, "rms_norm_eps": 1e-6,
        "num_hidden_layers": s.n_layer, "max_position_embeddings": 4096, "num_attention_heads": s.n_head, "num_key_value_heads": s.n_kv,
        "head_dim": s.head, "attention_bias": False, "num_experts": s.n_expert, "num_experts_per_tok": s.n_used,
        "moe_intermediate_size": s.ff, "tie_word_embeddings": form.tied,
    }  # fmt: skip


def linear_config(s: Sizes) -> dict[str, Any]:
    return {
        "linear_num_key_heads": s.k_heads, "linear_num_value_heads": s.v_heads, "linear_conv_kernel_dim": s.kernel,
        "linear_key_head_dim": s.linear_head, "linear_value_head_dim": s.linear_head, "shared_expert_intermediate_size": s.shared_ff,
    }  # fmt: skip


def config_35(s: Sizes, form: Form) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(s.n_layer)]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": sections(s)}
    own = {"model_type": "qwen3_5_moe_text", "layer_types": kinds, "rope_parameters": rope, "mtp_num_hidden_layers": int(form.mtp)}
    return {**linear_config(s), **own}


def config_next(s: Sizes, form: Form) -> dict[str, Any]:
    """As published: rope at the top, an interval and no list of layers, nothing of the MTP block."""
    own = {
        "model_type": "qwen3_next", "full_attention_interval": 4, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "rope_scaling": None, "intermediate_size": 4 * s.hidden, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return {**linear_config(s), **own}


def config_moe(s: Sizes, form: Form) -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024} if form.yarn else None
    return {
        "model_type": "qwen3_moe", "rope_theta": 10000.0, "rope_scaling": yarn, "intermediate_size": 4 * s.hidden, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None, "use_sliding_window": False,
    }  # fmt: skip


def config_vl(s: Sizes, form: Form) -> dict[str, Any]:
    pairs = s.head // 2
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [len(range(first, pairs, 3)) for first in range(3)]}
    own = {"model_type": "qwen3_vl_moe_text", "rope_theta": 10000.0, "rope_scaling": rope, "intermediate_size": 4 * s.hidden}
    return {**own, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def sections(s: Sizes) -> list[int]:
    """Pairs of rotated columns for time, height and width, which take turns."""
    return [len(range(first, s.head // 8, 3)) for first in range(3)]


def tokenizer_json(n_vocab: int, regex: str = QWEN35) -> dict[str, Any]:
    """Byte-level BPE: 256 bytes, a few merges, the added tokens; ids beyond them up to `n_vocab` stay free."""
    tokens = byte_alphabet()
    merges = [["t", "h"], ["th", "e"], ["Ġ", "a"], ["i", "n"]]
    tokens += ["".join(pair) for pair in merges]
    first = len(tokens)
    assert first + len(ADDED) <= n_vocab
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": first + i, "content": text, "special": "|" in text, **plain} for i, text in enumerate(ADDED)]
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
        "post_processor": None,
        "decoder": to_bytes,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, in the order of GPT-2's table: printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def n_weights(sizes: Sizes) -> int:
    return sum(prod(shape) for shape in all_shapes(sizes).values())
