"""Everything that the size of a graph depends on, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.settings import Settings
from a3b_gguf.tensors import TYPES

F32 = 4
MOST_LAYERS = 8  # two periods of a hybrid: from then on places repeat
SECTIONED = ("qwen35moe", "qwen35")  # multi-section rope: time, height, width and one more
NORMED_HEADS = ("qwen3moe", "qwen3", "qwen35moe", "qwen35", "qwen3next")


@dataclass(frozen=True, slots=True)
class LayerKind:
    recurrent: bool
    n_head_kv: int
    has_experts: bool


@dataclass(frozen=True, slots=True)
class Widths:
    """Dimensions of model and batch.

    is_hybrid: DeltaNet layers, gated attention. n_sections: numbers that give a token's position. norms_heads: norms of queries and
    keys. joins_gates: beta and alpha of DeltaNet come from one matrix. picks_early: rows without logits are dropped in the last layer,
    not behind it. mask: bytes of the attention mask. rotated: side of the rotation of a quantized K and V, 0 without.
    """

    layers: tuple[LayerKind, ...]
    is_hybrid: bool
    n_sections: int
    norms_heads: bool
    joins_gates: bool
    picks_early: bool
    n_embd: int
    n_vocab: int
    n_head: int
    k_dim: int
    v_dim: int
    n_expert: int
    n_expert_used: int
    n_ff: int
    n_ff_expert: int
    n_ff_shared: int
    conv_channels: int
    conv_state: int
    ssm_state: int
    ssm_inner: int
    ssm_heads: int
    n_rows: int
    n_seq: int
    n_outputs: int
    n_draft: int
    mask: int
    rotated: tuple[int, int]


def widths_of(facts: Facts, settings: Settings, layers: tuple[Layer, ...], all_layers: bool = False) -> Widths:
    """For `layers` of the model. all_layers: without it a few stand for all, which is what the search can afford."""
    rows = -(-settings.n_rows // settings.n_seq_max) * settings.n_seq_max  # graph_reserve rounds up
    kinds = tuple(LayerKind(layer.recurrent, layer.n_head_kv, bool(layer.expert_tensors)) for layer in layers)
    hybrid = facts.n_recurrent > 0
    return Widths(
        layers=kinds if all_layers else stand_ins(kinds),
        is_hybrid=hybrid,
        n_sections=4 if facts.architecture in SECTIONED else 1,
        norms_heads=facts.architecture in NORMED_HEADS,
        joins_gates=facts.architecture == "qwen3next",
        picks_early=not hybrid,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        n_head=facts.n_head,
        k_dim=facts.k_dim,
        v_dim=facts.v_dim,
        n_expert=facts.n_expert,
        n_expert_used=facts.n_expert_used,
        n_ff=facts.n_ff,
        n_ff_expert=facts.n_ff_expert,
        n_ff_shared=facts.n_ff_shared,
        conv_channels=facts.conv_channels,
        conv_state=facts.conv_state,
        ssm_state=facts.ssm_state,
        ssm_inner=facts.ssm_inner,
        ssm_heads=facts.ssm_heads,
        n_rows=rows,
        n_seq=settings.n_seq_max,
        n_outputs=min(rows, max(settings.n_outputs_max, settings.n_seq_max)),
        n_draft=settings.n_draft,
        mask=2 * settings.n_ctx_seq * rows,
        rotated=(rotation(settings.kv_type_k, facts.k_dim, facts.k_dim), rotation(settings.kv_type_v, facts.v_dim, 64)),
    )


def stand_ins(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The fewest layers that take the places that all take: two periods, three alike in a row doing as one does.

    A model that has no more than two periods stands for itself. Two of three can go because layers take the places of their results by
    turns. tests/test_memory_graph.py compares with all layers.
    """
    if len(kinds) <= MOST_LAYERS:
        return kinds
    found: list[LayerKind] = []
    for kind in kinds[:MOST_LAYERS]:
        if found[-2:] == [kind, kind]:
            found.pop()
        else:
            found.append(kind)
    return tuple(found) if len(set(found)) > 1 else kinds[:2]


def rotation(kind: str, dim: int, most: int) -> int:
    """Side of the matrix that spreads outliers before a quantized cache: the largest power of two that divides a head, at most `most`.

    Source: build_input_k_rot and build_input_v_rot in src/llama-kv-cache.cpp.
    """
    if TYPES[kind].is_float or dim % 64:
        return 0
    side = 64
    while 2 * side <= most and dim % (2 * side) == 0:
        side *= 2
    return side
