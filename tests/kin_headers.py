"""Sparse GGUF files with the true header of the 35B's kin: Qwen3-30B-A3B, Qwen3-Next-80B-A3B, and a dense llama (SmolLM2-135M).

Dimensions as published with the models; a vocabulary of `n_vocab` made-up tokens keeps them small. Never load one for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from a3b_gguf.gguf_write import file_size, header
from a3b_gguf.metadata import Metadata, array, f32, string, u32
from a3b_gguf.tensors import TYPES, GGMLType, TensorJob
from true_header import ALWAYS_F32, attention, delta_net, empty, experts, metadata_35b, tensors_35b, vocabulary
from true_header import type_of as type_35b

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]
SMALL_VOCAB = 4096


def sparse_30b(path: Path, kind: str = "iq4_nl", n_vocab: int = SMALL_VOCAB) -> Path:
    """Qwen3-30B-A3B: 48 attention layers, 128 experts of width 768, no shared expert."""
    numbers = {
        "block_count": 48, "context_length": 262144, "embedding_length": 2048, "feed_forward_length": 6144,
        "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128, "attention.value_length": 128,
        "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768,
    }  # fmt: skip

    def layer(i: int) -> Tensors:
        yield from plain_attention(i, 2048, 4096, 512, 128)
        yield from moe(i, 128, 768, "ffn_norm")

    return write(path, "qwen3moe", numbers, kind, n_vocab, layer)


def sparse_80b(path: Path, kind: str = "iq4_nl", n_vocab: int = SMALL_VOCAB) -> Path:
    """Qwen3-Next-80B-A3B: 36 DeltaNet and 12 attention layers, 512 experts of width 512, one shared expert."""
    numbers = {
        "block_count": 48, "context_length": 262144, "embedding_length": 2048, "feed_forward_length": 5120,
        "attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
        "expert_count": 512, "expert_used_count": 10, "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512,
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
        "rope.dimension_count": 64,
    }  # fmt: skip

    def layer(i: int) -> Tensors:
        if (i + 1) % 4:
            fused = (f"blk.{i}.ssm_ba.weight", (64, 2048))
            yield from (fused if name.endswith("ssm_alpha.weight") else (name, s) for name, s in delta_net(i) if "ssm_beta" not in name)
        else:
            yield from plain_attention(i, 2048, 8192, 512, 256, n_out=4096)
        yield from moe(i, 512, 512, "post_attention_norm")
        yield f"blk.{i}.ffn_gate_inp_shexp.weight", (2048,)
        for part, shape in (("gate", (512, 2048)), ("up", (512, 2048)), ("down", (2048, 512))):
            yield f"blk.{i}.ffn_{part}_shexp.weight", shape

    return write(path, "qwen3next", numbers, kind, n_vocab, layer)


def sparse_dense(path: Path, kind: str = "q8_0", n_vocab: int = SMALL_VOCAB) -> Path:
    """SmolLM2-135M: 30 layers of a dense llama whose output shares the embedding."""
    numbers = {
        "block_count": 30, "context_length": 8192, "embedding_length": 576, "feed_forward_length": 1536, "attention.head_count": 9,
        "attention.head_count_kv": 3, "rope.dimension_count": 64,
    }  # fmt: skip

    def layer(i: int) -> Tensors:
        yield from list(plain_attention(i, 576, 576, 192, 64))[:-2]  # llama has no norms of q and k
        yield f"blk.{i}.ffn_norm.weight", (576,)
        for part, shape in (("gate", (1536, 576)), ("up", (1536, 576)), ("down", (576, 1536))):
            yield f"blk.{i}.ffn_{part}.weight", shape

    return write(path, "llama", numbers, kind, n_vocab, layer, tied=True)


def plain_attention(i: int, n_embd: int, n_q: int, n_kv: int, head: int, n_out: int = 0) -> Tensors:
    yield f"blk.{i}.attn_norm.weight", (n_embd,)
    yield f"blk.{i}.attn_q.weight", (n_q, n_embd)
    yield f"blk.{i}.attn_k.weight", (n_kv, n_embd)
    yield f"blk.{i}.attn_v.weight", (n_kv, n_embd)
    yield f"blk.{i}.attn_output.weight", (n_embd, n_out or n_q)
    yield f"blk.{i}.attn_q_norm.weight", (head,)
    yield f"blk.{i}.attn_k_norm.weight", (head,)


def moe(i: int, n_expert: int, n_ff: int, norm: str) -> Tensors:
    yield f"blk.{i}.{norm}.weight", (2048,)
    yield f"blk.{i}.ffn_gate_inp.weight", (n_expert, 2048)
    yield f"blk.{i}.ffn_gate_exps.weight", (n_expert, n_ff, 2048)
    yield f"blk.{i}.ffn_up_exps.weight", (n_expert, n_ff, 2048)
    yield f"blk.{i}.ffn_down_exps.weight", (n_expert, 2048, n_ff)


def write(
    path: Path, arch: str, numbers: dict[str, int], kind: str, n_vocab: int, layer: Callable[[int], Tensors], tied: bool = False
) -> Path:
    tensors: list[tuple[str, Shape]] = [("token_embd.weight", (n_vocab, numbers["embedding_length"]))]
    tensors += [] if tied else [("output.weight", (n_vocab, numbers["embedding_length"]))]
    tensors.append(("output_norm.weight", (numbers["embedding_length"],)))
    for i in range(numbers["block_count"]):
        tensors += layer(i)
    metadata: Metadata = {
        "general.architecture": string(arch),
        "general.name": string(path.stem),
        **{f"{arch}.{key}": u32(value) for key, value in numbers.items()},
        f"{arch}.attention.layer_norm_rms_epsilon": f32(1e-6),
        f"{arch}.rope.freq_base": f32(1e6),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("qwen2"),
        "tokenizer.ggml.tokens": array("str", vocabulary(n_vocab)),
        "tokenizer.ggml.token_type": array("i32", [1] * n_vocab),
        "tokenizer.ggml.merges": array("str", [f"t{i} t{i + 1}" for i in range(16)]),
        "tokenizer.ggml.eos_token_id": u32(2),
    }
    jobs = [TensorJob(name, shape, type_of(name, kind, shape), empty) for name, shape in tensors]
    with path.open("wb") as out:
        out.write(header(metadata, jobs)[0])
        out.truncate(file_size(metadata, jobs))
    return path


def type_of(name: str, kind: str, shape: Shape) -> GGMLType:
    """Experts in `kind`, other matrices in q8_0, the rest in f32; without experts `kind` goes to all matrices."""
    if name.endswith(ALWAYS_F32) or len(shape) == 1:
        return TYPES["f32"]
    return TYPES[kind] if "_exps." in name or kind == "bf16" else TYPES["q8_0"]


def sparse_35b_mtp(path: Path, n_vocab: int = SMALL_VOCAB) -> Path:
    """Qwen3.6-35B-A3B with experts in iq4_nl and its MTP block, which is one more attention layer behind a projection."""
    metadata = metadata_35b(n_vocab, 25)
    metadata["qwen35moe.block_count"], metadata["qwen35moe.nextn_predict_layers"] = u32(41), u32(1)
    metadata["qwen35moe.attention.recurrent_layers"] = array("bool", [(i + 1) % 4 != 0 and i < 40 for i in range(41)])
    nextn = [("eh_proj", (2048, 4096)), ("enorm", (2048,)), ("hnorm", (2048,)), ("shared_head_norm", (2048,))]
    tensors = [*tensors_35b(n_vocab), *attention(40), *experts(40), *((f"blk.40.nextn.{name}.weight", shape) for name, shape in nextn)]
    jobs = [TensorJob(name, shape, TYPES["f32"] if len(shape) == 1 else type_35b(name, "iq4_nl"), empty) for name, shape in tensors]
    with path.open("wb") as out:
        out.write(header(metadata, jobs)[0])
        out.truncate(file_size(metadata, jobs))
    return path
