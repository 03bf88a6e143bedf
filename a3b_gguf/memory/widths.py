"""Everything that the size of a graph depends on, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.settings import Settings
from a3b_gguf.tensors import TYPES

F32 = 4
MOST_LAYERS = 8  # two periods of a hybrid: from then on places repeat
ALIKE_LAYERS = 3
MIXED_LAYERS = 12  # three periods, where copies of caches and of weights must find room between each other
SECTIONED = ("qwen35moe", "qwen35")  # multi-section rope: time, height, width and one more
NORMED_HEADS = ("qwen3moe", "qwen3", "qwen35moe", "qwen35", "qwen3next")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A block as the graph sees it. in_ram: it is there while a GPU computes with it; then matrices has (name, bytes) of each of its
    matrices but those of experts, and kv_bytes the sizes of its K and V caches.
    """

    recurrent: bool
    n_head_kv: int
    has_experts: bool
    in_ram: bool = False
    matrices: tuple[tuple[str, int], ...] = ()
    kv_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Widths:
    """Dimensions of model and batch.

    is_hybrid: DeltaNet layers, gated attention. n_sections: numbers that give a token's position. norms_heads: norms of queries and
    keys. joins_gates: beta and alpha of DeltaNet come from one matrix. picks_early: rows without logits are dropped in the last layer,
    not behind it. mask: bytes of the attention mask. rotated: side of the rotation of a quantized K and V, 0 without. f16_copies: bytes
    of a copy of K and of V for each head, where attention needs one. keeps_experts: results of experts stay until they are summed up.
    scores: bytes of what all heads give all pairs of tokens, which are kept where there is no flash attention.
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
    f16_copies: tuple[int, int] = (0, 0)
    keeps_experts: bool = False
    scores: int = 0

    @property
    def hidden(self) -> int:
        """Bytes of the rows that a block hands to the next."""
        return F32 * self.n_embd * self.n_rows

    @property
    def inputs(self) -> int:
        """Bytes of a graph's inputs that every block reads: mask, positions, places in the caches, rotations."""
        rotations = sum(F32 * side * side for side in self.rotated)
        return self.mask + 4 * self.n_rows * self.n_sections + 2 * 8 * self.n_rows + 4 * self.n_seq + rotations


def widths_of(
    facts: Facts, settings: Settings, layers: tuple[Layer, ...], all_layers: bool = False, n_in_ram: int = 0, staged: bool = False
) -> Widths:
    """For `layers` of the model. all_layers: without it a few stand for all, which is what the search can afford.

    n_in_ram: the first so many of them are in RAM although a GPU computes with them. staged: it copies some of their weights.
    """
    rows = -(-settings.n_rows // settings.n_seq_max) * settings.n_seq_max  # graph_reserve rounds up
    n_in_ram = as_many_in_ram(layers, n_in_ram)
    shown = layers if all_layers else layers[: MIXED_LAYERS if n_in_ram else MOST_LAYERS + 1]  # one more says that there are more
    kinds = tuple(kind_of(facts, settings, layer, in_ram=i < n_in_ram) for i, layer in enumerate(shown))
    hybrid = facts.n_recurrent > 0
    most = MOST_LAYERS if hybrid else ALIKE_LAYERS
    return Widths(
        layers=kinds if all_layers or n_in_ram else kinds[:most] if staged or not settings.flash_attn else stand_ins(kinds),
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
        mask=(2 if settings.flash_attn else F32) * settings.n_ctx_seq * rows,
        scores=score_bytes(facts, settings, rows, F32),
        rotated=(rotation(settings.kv_type_k, facts.k_dim, facts.k_dim), rotation(settings.kv_type_v, facts.v_dim, 64)),
    )


def score_bytes(facts: Facts, settings: Settings, rows: int, width: int) -> int:
    """Scores of `rows` tokens with all that they see, for every head, in numbers of `width` bytes. Source: build_attn_mha."""
    return 0 if settings.flash_attn else width * settings.n_ctx_seq * rows * facts.n_head


def as_many_in_ram(layers: tuple[Layer, ...], n: int) -> int:
    """A number of layers in RAM that takes no less than `n` do: one, or enough for all kinds to come again and again.

    A search that tries every number has two graphs to replay then.
    """
    of_all = {layer.recurrent for layer in layers}
    return n if not n else MIXED_LAYERS if {layer.recurrent for layer in layers[:n]} == of_all else 1


def kind_of(facts: Facts, settings: Settings, layer: Layer, in_ram: bool) -> LayerKind:
    if not in_ram:
        return LayerKind(layer.recurrent, layer.n_head_kv, bool(layer.expert_tensors))
    k, v = (
        layer.n_head_kv * dim * settings.n_ctx * TYPES[kind].block_bytes // TYPES[kind].block
        for dim, kind in ((facts.k_dim, settings.kv_type_k), (facts.v_dim, settings.kv_type_v))
    )
    return LayerKind(layer.recurrent, layer.n_head_kv, bool(layer.expert_tensors), True, layer.dense_tensors, (k, v))


def stand_ins(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The fewest layers that take the places that all take: two periods, three alike in a row doing as one does.

    A model that has no more than two periods stands for itself. Two of three can go because layers take the places of their results by
    turns; not where scores of attention are kept. tests/test_memory_graph.py compares with all layers.
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
