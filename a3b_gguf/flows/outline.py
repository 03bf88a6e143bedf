"""The header that a model of the catalog has as a GGUF file: names, shapes and metadata from its dimensions, without any file.

The names and shapes are those that convert writes (src/models/qwen35moe.cpp, qwen3moe.cpp and qwen3next.cpp read them).
"""

from __future__ import annotations

from collections.abc import Iterator

from a3b_gguf.catalog import ModelEntry
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Metadata, string, u32

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
NEEDED = ("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim", "n_expert", "n_expert_used", "n_ff_expert", "n_vocab")
HYBRID_NEEDS = ("full_attention_interval", "ssm_conv_kernel", "ssm_state_size", "ssm_group_count", "ssm_time_step_rank", "n_ff_shared")
ARCHITECTURES = ("qwen35moe", "qwen3moe", "qwen3next")
UNSAID_CTX = 32768


def size(entry: ModelEntry, key: str) -> int:
    """A dimension. Raises BadInput when the catalog does not have it."""
    value = getattr(entry, key)
    if not isinstance(value, int):
        raise BadInput(f"the catalog does not say {key} of {entry.name}", "plan for its .gguf file")
    return value


def outline(entry: ModelEntry) -> tuple[Metadata, list[tuple[str, Shape]]]:
    """Metadata and tensors. Raises BadInput for a model whose dimensions are not all known."""
    if entry.architecture not in ARCHITECTURES:
        raise BadInput(f"{entry.name}: the tensors of {entry.architecture} are not known", "plan for its .gguf file")
    for key in (*NEEDED, *(HYBRID_NEEDS if entry.architecture != "qwen3moe" else ())):
        size(entry, key)
    return metadata(entry), list(tensors(entry))


def metadata(entry: ModelEntry) -> Metadata:
    numbers = {
        "block_count": size(entry, "n_layer") + (entry.n_layer_nextn or 0),
        "context_length": entry.n_ctx or UNSAID_CTX,
        "embedding_length": entry.n_embd,
        "attention.head_count": entry.n_head,
        "attention.head_count_kv": entry.n_head_kv,
        "attention.key_length": entry.head_dim,
        "attention.value_length": entry.head_dim,
        "expert_count": entry.n_expert,
        "expert_used_count": entry.n_expert_used,
        "expert_feed_forward_length": entry.n_ff_expert,
        "expert_shared_feed_forward_length": entry.n_ff_shared,
        "nextn_predict_layers": entry.n_layer_nextn,
        "full_attention_interval": entry.full_attention_interval,
        "ssm.conv_kernel": entry.ssm_conv_kernel,
        "ssm.state_size": entry.ssm_state_size,
        "ssm.group_count": entry.ssm_group_count,
        "ssm.time_step_rank": entry.ssm_time_step_rank,
        "ssm.inner_size": inner(entry) or None,
    }
    known = {f"{entry.architecture}.{key}": u32(value) for key, value in numbers.items() if value}
    return {"general.architecture": string(entry.architecture), "general.name": string(entry.name), **known}


def inner(entry: ModelEntry) -> int:
    return (entry.ssm_time_step_rank or 0) * (entry.ssm_state_size or 0)


def tensors(entry: ModelEntry) -> Named:
    """Every tensor in the order of a file, its shape with columns last."""
    n_embd, n_vocab, n_layer = size(entry, "n_embd"), size(entry, "n_vocab"), size(entry, "n_layer")
    yield "token_embd.weight", (n_vocab, n_embd)
    yield "output.weight", (n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    interval = entry.full_attention_interval or 1
    for i in range(n_layer):
        yield from named(i, attention(entry) if (i + 1) % interval == 0 else delta_net(entry))
        yield from named(i, experts(entry))
    for i in range(n_layer, n_layer + (entry.n_layer_nextn or 0)):
        yield from named(i, attention(entry))
        yield from named(i, experts(entry))
        yield f"blk.{i}.nextn.eh_proj.weight", (n_embd, 2 * n_embd)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            yield f"blk.{i}.nextn.{norm}.weight", (n_embd,)


def named(layer: int, rows: Named) -> Named:
    return ((f"blk.{layer}.{name}", shape) for name, shape in rows)


def attention(entry: ModelEntry) -> Named:
    """Grouped-query attention; the hybrids' queries bring a gate of the same size."""
    n_embd, dim = size(entry, "n_embd"), size(entry, "head_dim")
    heads, n_kv = size(entry, "n_head") * dim, size(entry, "n_head_kv") * dim
    yield "attn_norm.weight", (n_embd,)
    yield "attn_q.weight", (heads if entry.architecture == "qwen3moe" else 2 * heads, n_embd)
    yield "attn_k.weight", (n_kv, n_embd)
    yield "attn_v.weight", (n_kv, n_embd)
    yield "attn_output.weight", (n_embd, heads)
    yield "attn_q_norm.weight", (dim,)
    yield "attn_k_norm.weight", (dim,)


def delta_net(entry: ModelEntry) -> Named:
    n_embd, rank, state = size(entry, "n_embd"), size(entry, "ssm_time_step_rank"), size(entry, "ssm_state_size")
    channels = inner(entry) + 2 * size(entry, "ssm_group_count") * state
    yield "attn_norm.weight", (n_embd,)
    yield "attn_qkv.weight", (channels, n_embd)
    yield "attn_gate.weight", (inner(entry), n_embd)
    if entry.architecture == "qwen3next":
        yield "ssm_ba.weight", (2 * rank, n_embd)
    else:
        yield "ssm_alpha.weight", (rank, n_embd)
        yield "ssm_beta.weight", (rank, n_embd)
    yield "ssm_conv1d.weight", (channels, size(entry, "ssm_conv_kernel"))
    yield "ssm_a", (rank,)
    yield "ssm_dt.bias", (rank,)
    yield "ssm_norm.weight", (state,)
    yield "ssm_out.weight", (n_embd, inner(entry))


def experts(entry: ModelEntry) -> Named:
    n_embd, n_expert, n_ff = size(entry, "n_embd"), size(entry, "n_expert"), size(entry, "n_ff_expert")
    yield ("ffn_norm.weight" if entry.architecture == "qwen3moe" else "post_attention_norm.weight"), (n_embd,)
    yield "ffn_gate_inp.weight", (n_expert, n_embd)
    yield "ffn_gate_exps.weight", (n_expert, n_ff, n_embd)
    yield "ffn_up_exps.weight", (n_expert, n_ff, n_embd)
    yield "ffn_down_exps.weight", (n_expert, n_embd, n_ff)
    if shared := entry.n_ff_shared:
        yield "ffn_gate_inp_shexp.weight", (n_embd,) if entry.architecture == "qwen3next" else (1, n_embd)
        yield "ffn_gate_shexp.weight", (shared, n_embd)
        yield "ffn_up_shexp.weight", (shared, n_embd)
        yield "ffn_down_shexp.weight", (n_embd, shared)
