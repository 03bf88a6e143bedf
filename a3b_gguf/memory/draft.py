"""What speculative decoding with the MTP block takes: a second context on the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from a3b_gguf.machine import Device
from a3b_gguf.memory.cache import F32, kv_row_bytes
from a3b_gguf.memory.compute import converted_scores, mtp_buffers
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Term


def mtp_context(facts: Facts, used: Sequence[Device], placement: Placement, settings: Settings) -> list[Term]:
    """Cache, buffers and logits of the MTP context: as long and with as many sequences as the model's own.

    Source: graph_mtp in src/models/qwen35moe.cpp and llama_kv_cache's layer filter for LLAMA_CONTEXT_TYPE_MTP. The hidden rows that
    both contexts hand over (llama_set_embeddings_nextn, unmasked) take n_batch * n_embd floats each.
    """
    if not settings.load_mtp or not facts.nextn:
        return []
    home = placement.layers[facts.n_layer]
    rows = sum(kv_row_bytes(facts, layer.n_head_kv, settings) for layer in facts.nextn)
    buffers = mtp_buffers(facts, used[-1] if used else None, replace(settings, n_draft=0, n_outputs_max=settings.n_seq_max), facts.nextn)
    return [
        Term("MTP context: KV cache", home, rows * settings.n_ctx),
        Term("MTP context: compute buffer", HOST, buffers.host, exact=False),
        Term("MTP context: attention scores as V is", HOST, converted_scores(facts, settings), exact=False),
        *(Term("MTP context: compute buffer", gpu.name, buffers.device, exact=False) for gpu in used[-1:]),
        Term("MTP context: output buffer", HOST, F32 * facts.n_vocab * settings.n_seq_max),
        Term("hidden rows for drafts", HOST, 2 * F32 * settings.n_ubatch * facts.n_embd, exact=False),
    ]

