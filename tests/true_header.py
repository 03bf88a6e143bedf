"""Sparse GGUF files with the true header of Qwen3.6-35B-A3B and its kin: right names, shapes, types and metadata, no weights.

What reads headers only (inspect, plan, llama-quantize's dry run, llama.cpp with no_alloc) cannot tell them from the real files.
Never load one for real: the weights are holes.

    python tests/true_header.py OUT.gguf [bf16|iq4_nl]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from a3b_gguf.gguf_write import file_size, header
from a3b_gguf.metadata import Metadata, array, boolean, f32, string, u32
from a3b_gguf.tensors import TYPES, GGMLType, TensorJob

N_LAYER, N_EMBD, N_EXPERT, N_FF, INTERVAL = 40, 2048, 256, 512, 4
SPECIALS = {
    0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 14: "<tool_call>", 15: "</tool_call>", 22: "<tool_response>",
    23: "</tool_response>", 24: "<think>", 25: "</think>",
}  # fmt: skip
FIRST_SPECIAL_FROM_END = 248320 - 248044
ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "ssm_a", "ssm_dt.bias")
ALSO_F32_IN_OURS = ("ssm_alpha.weight", "ssm_beta.weight")


def sparse_35b(path: Path, kind: str = "bf16", n_vocab: int = 248320) -> Path:
    """Writes a sparse file with the header of Qwen3.6-35B-A3B (733 tensors, no MTP block) and returns `path`.

    kind: "bf16" as convert writes it, or "iq4_nl" as our recipe of that name would.
    """
    metadata = metadata_35b(n_vocab, file_type=32 if kind == "bf16" else 25)
    jobs = [TensorJob(name, shape, type_of(name, kind), empty) for name, shape in tensors_35b(n_vocab)]
    start, _ = header(metadata, jobs)
    with path.open("wb") as out:
        out.write(start)
        out.truncate(file_size(metadata, jobs))
    return path


def empty() -> Iterator[bytes]:
    yield from ()


def type_of(name: str, kind: str) -> GGMLType:
    if name.endswith(ALWAYS_F32):
        return TYPES["f32"]
    if kind == "bf16":
        return TYPES["bf16"]
    if name.endswith(ALSO_F32_IN_OURS):
        return TYPES["f32"]
    if name in ("token_embd.weight", "output.weight"):
        return TYPES["q6_k"]
    return TYPES["iq4_nl"] if "_exps." in name else TYPES["q8_0"]


def tensors_35b(n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (n_vocab, N_EMBD)
    yield "output.weight", (n_vocab, N_EMBD)
    yield "output_norm.weight", (N_EMBD,)
    for i in range(N_LAYER):
        layer = attention(i) if (i + 1) % INTERVAL == 0 else delta_net(i)
        yield from layer
        yield from experts(i)


def delta_net(i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"blk.{i}.attn_norm.weight", (N_EMBD,)
    yield f"blk.{i}.attn_qkv.weight", (8192, N_EMBD)
    yield f"blk.{i}.attn_gate.weight", (4096, N_EMBD)
    yield f"blk.{i}.ssm_alpha.weight", (32, N_EMBD)
    yield f"blk.{i}.ssm_beta.weight", (32, N_EMBD)
    yield f"blk.{i}.ssm_conv1d.weight", (8192, 4)
    yield f"blk.{i}.ssm_a", (32,)
    yield f"blk.{i}.ssm_dt.bias", (32,)
    yield f"blk.{i}.ssm_norm.weight", (128,)
    yield f"blk.{i}.ssm_out.weight", (N_EMBD, 4096)


def attention(i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"blk.{i}.attn_norm.weight", (N_EMBD,)
    yield f"blk.{i}.attn_q.weight", (8192, N_EMBD)
    yield f"blk.{i}.attn_k.weight", (512, N_EMBD)
    yield f"blk.{i}.attn_v.weight", (512, N_EMBD)
    yield f"blk.{i}.attn_output.weight", (N_EMBD, 4096)
    yield f"blk.{i}.attn_q_norm.weight", (256,)
    yield f"blk.{i}.attn_k_norm.weight", (256,)


def experts(i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"blk.{i}.post_attention_norm.weight", (N_EMBD,)
    yield f"blk.{i}.ffn_gate_inp.weight", (N_EXPERT, N_EMBD)
    yield f"blk.{i}.ffn_gate_exps.weight", (N_EXPERT, N_FF, N_EMBD)
    yield f"blk.{i}.ffn_up_exps.weight", (N_EXPERT, N_FF, N_EMBD)
    yield f"blk.{i}.ffn_down_exps.weight", (N_EXPERT, N_EMBD, N_FF)
    yield f"blk.{i}.ffn_gate_inp_shexp.weight", (1, N_EMBD)
    yield f"blk.{i}.ffn_gate_shexp.weight", (N_FF, N_EMBD)
    yield f"blk.{i}.ffn_up_shexp.weight", (N_FF, N_EMBD)
    yield f"blk.{i}.ffn_down_shexp.weight", (N_EMBD, N_FF)


def metadata_35b(n_vocab: int, file_type: int) -> Metadata:
    """The metadata keys of a converted Qwen3.6-35B-A3B, with a made-up vocabulary of the true size."""
    arch = "qwen35moe"
    tokens = vocabulary(n_vocab)
    control = {n_vocab - FIRST_SPECIAL_FROM_END + k for k in (0, 1, 2)}
    user = {n_vocab - FIRST_SPECIAL_FROM_END + k for k in SPECIALS} - control
    return {
        "general.architecture": string(arch),
        "general.type": string("model"),
        "general.name": string("Qwen3.6 35B A3B"),
        "general.size_label": string("35B-A3B"),
        f"{arch}.block_count": u32(N_LAYER),
        f"{arch}.context_length": u32(262144),
        f"{arch}.embedding_length": u32(N_EMBD),
        f"{arch}.attention.head_count": u32(16),
        f"{arch}.attention.head_count_kv": u32(2),
        f"{arch}.rope.dimension_sections": array("i32", [11, 11, 10, 0]),
        f"{arch}.rope.freq_base": f32(1e7),
        f"{arch}.attention.layer_norm_rms_epsilon": f32(1e-6),
        f"{arch}.expert_count": u32(N_EXPERT),
        f"{arch}.expert_used_count": u32(8),
        f"{arch}.attention.key_length": u32(256),
        f"{arch}.attention.value_length": u32(256),
        "general.file_type": u32(file_type),
        f"{arch}.expert_feed_forward_length": u32(N_FF),
        f"{arch}.expert_shared_feed_forward_length": u32(N_FF),
        f"{arch}.ssm.conv_kernel": u32(4),
        f"{arch}.ssm.state_size": u32(128),
        f"{arch}.ssm.group_count": u32(16),
        f"{arch}.ssm.time_step_rank": u32(32),
        f"{arch}.ssm.inner_size": u32(4096),
        f"{arch}.attention.recurrent_layers": array("bool", [(i + 1) % INTERVAL != 0 for i in range(N_LAYER)]),
        f"{arch}.full_attention_interval": u32(INTERVAL),
        f"{arch}.rope.dimension_count": u32(64),
        "general.quantization_version": u32(2),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("qwen35"),
        "tokenizer.ggml.tokens": array("str", tokens),
        "tokenizer.ggml.token_type": array("i32", [3 if i in control else 4 if i in user else 1 for i in range(n_vocab)]),
        "tokenizer.ggml.merges": array("str", [f"t{i} t{i + 1}" for i in range(n_vocab - 1024)]),
        "tokenizer.ggml.eos_token_id": u32(n_vocab - FIRST_SPECIAL_FROM_END + 2),
        "tokenizer.ggml.padding_token_id": u32(n_vocab - FIRST_SPECIAL_FROM_END),
        "tokenizer.ggml.bos_token_id": u32(n_vocab - FIRST_SPECIAL_FROM_END),
        "tokenizer.ggml.add_bos_token": boolean(False),
    }


def vocabulary(n_vocab: int) -> list[str]:
    """Byte-level alphabet first, so that llama.cpp can tokenise, then fillers, the special tokens where Qwen3.6 has them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(b) for b in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    tokens = alphabet + [f"token{i}" for i in range(256, n_vocab)]
    for k, text in SPECIALS.items():
        tokens[n_vocab - FIRST_SPECIAL_FROM_END + k] = text
    return tokens


if __name__ == "__main__":
    sparse_35b(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "bf16")
