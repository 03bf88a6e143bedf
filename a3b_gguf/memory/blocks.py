"""Attention, DeltaNet, experts and feed-forward part of a graph, by sizes only."""

from __future__ import annotations

from a3b_gguf.memory.allocate import GPU_ALIGNMENT, Graph, Tensor
from a3b_gguf.memory.widths import F32, LayerKind, Widths

MOST_SUMMED = 15  # MOE_WEIGHTED_REDUCTION_MAX_EXPERTS of ggml/src/ggml-cuda/ggml-cuda.cu


class Blocks:
    """Adds blocks to a graph. Owns the graph's inputs, which are made when a block first asks for them."""

    def __init__(self, graph: Graph, widths: Widths, in_ram: dict[str, int]) -> None:
        self.graph, self.widths, self.in_ram = graph, widths, in_ram
        self.positions = Tensor(4 * widths.n_rows * widths.n_sections, kind="input")
        # Without flash attention V lies transposed, and each of a token's numbers has a place of its own.
        places = max(kind.n_head_kv for kind in widths.layers) * widths.v_dim if widths.scores else 1
        self.k_index, self.v_index = (Tensor(8 * widths.n_rows * n, kind="input") for n in (1, places))
        self.mask = Tensor(widths.mask, kind="input")
        self.k_rotation, self.v_rotation = (Tensor(F32 * side * side, kind="input") for side in widths.rotated)
        self.states = Tensor(4 * widths.n_seq, kind="input")
        self.picked = Tensor(4 * widths.n_outputs, kind="input")
        self.matrices: dict[str, int] | None = None  # of the block that is being added, when it is in RAM
        self.kv_bytes = 0, 0

    def enter(self, kind: LayerKind) -> None:
        """Begins a block."""
        self.matrices, self.kv_bytes = dict(kind.matrices) if kind.in_ram else None, kind.kv_bytes

    def leave(self) -> None:
        """Ends the last block: what follows is on the GPU."""
        self.matrices, self.kv_bytes = None, (0, 0)

    def weight(self, name: str = "") -> Tensor:
        """A matrix that lies where it is used; one of the experts that are in RAM; or one of a block that is."""
        n_bytes = self.in_ram.get(name, (self.matrices or {}).get(name, 0))
        return Tensor(n_bytes, kind="copied") if n_bytes else Tensor(0, kind="kept")

    def vector(self, width: int) -> Tensor:
        """A norm, a bias or another small weight in f32."""
        return Tensor(F32 * width, kind="copied") if self.matrices is not None else Tensor(0, kind="kept")

    def cache(self, n_bytes: int) -> Tensor:
        """Allocated elsewhere, and copied to the GPU when it is in RAM."""
        return Tensor(n_bytes, kind="cached") if self.matrices is not None and n_bytes else Tensor(0, kind="kept")

    def multiply(self, name: str, width: int, source: Tensor, rows: int | None = None) -> Tensor:
        """The matrix `name`, of `width` rows, times `source`."""
        rows = self.widths.n_rows if rows is None else rows
        return Tensor(F32 * width * rows, (self.weight(name), source), (width, rows))

    def over(self, source: Tensor, *others: Tensor, layout: object = None, n_bytes: int = 0) -> Tensor:
        """The result of an operation that may be written over `source`."""
        return Tensor(n_bytes or source.n_bytes, (source, *others), layout or source.layout, reuses=True)

    def view(self, source: Tensor, layout: object = None) -> Tensor:
        return Tensor(0, (source,), layout, root=source.root or source)

    def norm(self, source: Tensor, width: int, rows: int | None = None, layout: object = None) -> Tensor:
        """rms_norm, then times its weight. Source: build_norm in src/llama-graph.cpp."""
        size = F32 * width * (self.widths.n_rows if rows is None else rows)
        plain = self.over(source, layout=layout, n_bytes=size)
        return self.over(plain, self.vector(width))

    def add(self, first: Tensor, second: Tensor, rows: int) -> Tensor:
        return Tensor(F32 * self.widths.n_embd * rows, (first, second), (self.widths.n_embd, rows), reuses=True)

    def rows(self, source: Tensor, rows: int) -> Tensor:
        """Only the rows whose logits are asked for."""
        return Tensor(F32 * self.widths.n_embd * rows, (source, self.picked), (self.widths.n_embd, rows))

    def attention(self, hidden: Tensor, n_head_kv: int) -> Tensor:
        """Source: build_layer_attn in src/models/qwen35moe.cpp, build_qkv, build_attn and build_attn_mha in src/llama-graph.cpp."""
        w, rows = self.widths, self.widths.n_rows
        q_width, k_width, v_width = w.n_head * w.k_dim, n_head_kv * w.k_dim, n_head_kv * w.v_dim
        q_layout, k_layout = (w.k_dim, w.n_head, rows), (w.k_dim, n_head_kv, rows)
        q_full = self.multiply("attn_q", 2 * q_width if w.is_hybrid else q_width, hidden)
        k, v = self.multiply("attn_k", k_width, hidden), self.multiply("attn_v", v_width, hidden)
        q, k = (self.view(q_full), self.view(k, k_layout)) if w.is_hybrid else (self.view(q_full, q_layout), self.view(k, k_layout))
        if w.norms_heads:
            q, k = self.norm(q, q_width, layout=q_layout), self.norm(k, k_width, layout=k_layout)
        gate = Tensor(F32 * q_width * rows, (self.view(q_full),), (q_width, rows)) if w.is_hybrid else None
        v = self.view(v, (w.v_dim, n_head_kv, rows))
        q = self.over(q, self.positions, layout=q_layout, n_bytes=F32 * q_width * rows)
        k = self.over(k, self.positions, layout=k_layout, n_bytes=F32 * k_width * rows)
        if w.rotated[0]:
            q, k = self.rotate(q, q_width, self.k_rotation), self.rotate(k, k_width, self.k_rotation)
        if w.rotated[1]:
            v = self.rotate(v, v_width, self.v_rotation)
        for tensor in (q, v, k):
            self.graph.expand(tensor)
        for tensor, index in ((k, self.k_index), (v, self.v_index)):
            self.store(self.view(tensor), index)
        cached = [self.cache(n_bytes) for n_bytes in self.kv_bytes]
        out = self.scored(q, *cached) if w.scores else self.mixed(q, n_head_kv, *cached)
        self.graph.expand(out)
        if w.rotated[1]:
            out = self.rotate(out, w.n_head * w.v_dim, self.v_rotation)
        if gate is not None:
            out = Tensor(F32 * q_width * rows, (out, self.over(gate)), (q_width, rows), reuses=True)
        return self.multiply("attn_output", w.n_embd, out)

    def mixed(self, q: Tensor, n_head_kv: int, k: Tensor, v: Tensor) -> Tensor:
        """Flash attention: one operation, nothing beside its result."""
        mixed = Tensor(self.mixed_bytes(n_head_kv), (self.view(self.view(q)), k, v, self.mask))
        return self.view(mixed, (self.widths.n_head * self.widths.v_dim, self.widths.n_rows))

    def scored(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Without it: the scores of all pairs of tokens, made into shares where they are, times V."""
        w = self.widths
        size = F32 * w.n_head * w.v_dim * w.n_rows
        shares = self.over(Tensor(w.scores, (k, self.view(self.view(q)))), self.mask)
        return Tensor(size, (self.view(Tensor(size, (v, shares))),), (w.n_head * w.v_dim, w.n_rows))

    def mixed_bytes(self, n_head_kv: int) -> int:
        """The result of attention, and behind it f16 copies of the cache. Source: ggml_cuda_flash_attn_ext_get_f16_extra_data
        in ggml/src/ggml-cuda/fattn-common.cuh.
        """
        n_bytes = F32 * self.widths.n_head * self.widths.v_dim * self.widths.n_rows
        for copy in self.widths.f16_copies:
            if copy:
                n_bytes = -(-n_bytes // GPU_ALIGNMENT) * GPU_ALIGNMENT + n_head_kv * copy
        return n_bytes

    def rotate(self, source: Tensor, width: int, rotation: Tensor) -> Tensor:
        """Source: llama_mul_mat_hadamard in src/llama-graph.cpp."""
        return self.view(Tensor(F32 * width * self.widths.n_rows, (rotation, self.view(source))))

    def store(self, source: Tensor, *others: Tensor) -> None:
        """Written into a cache, which lies elsewhere."""
        cache = Tensor(0, kind="kept")
        stored = Tensor(0, (source, *others, cache), kind="stored", root=cache)
        stored.on_host = self.matrices is not None
        self.graph.expand(stored)

    def state(self, size: int) -> Tensor:
        """States of all sequences, copied out of the cache. Source: build_rs in src/llama-graph.cpp."""
        states = self.cache(F32 * size * self.widths.n_seq * (1 + self.widths.n_draft))
        flat = self.view(states)
        zeroed = Tensor(0, (self.view(flat),), kind="stored", root=states)
        zeroed.on_host = self.matrices is not None
        self.graph.expand(zeroed)
        main = Tensor(F32 * size * self.widths.n_seq, (flat, self.view(self.states)))
        self.graph.expand(main)
        extra = Tensor(0, (flat, self.view(self.states)))
        kept = Tensor(0, (extra, self.view(states)), kind="stored", root=states)
        kept.on_host = self.matrices is not None
        self.graph.expand(kept)
        return main

    def delta_net(self, hidden: Tensor) -> Tensor:
        """Source: build_layer_attn_linear in src/models/qwen35moe.cpp and qwen3next.cpp, src/models/delta-net-base.cpp."""
        w, rows = self.widths, self.widths.n_rows
        mixed = self.view(self.multiply("attn_qkv", w.conv_channels, hidden))
        z = self.multiply("attn_gate", w.ssm_inner, hidden)
        beta, gate = self.joined_gates(hidden) if w.joins_gates else self.own_gates(hidden)
        history = w.n_seq * w.conv_state // w.conv_channels
        conv_in = Tensor(F32 * w.conv_channels * (rows + history), (self.view(self.state(w.conv_state)), self.view(mixed)))
        for _ in range(1 + w.n_draft):
            self.store(self.view(conv_in))
        state = self.view(self.state(w.ssm_state))
        conv_out = self.over(Tensor(F32 * w.conv_channels * rows, (conv_in, self.vector(w.conv_state + w.conv_channels))))
        q, k = self.normed_heads(conv_out), self.normed_heads(conv_out)
        v = self.view(conv_out)
        if w.joins_gates:
            q, k = (self.view(Tensor(F32 * w.ssm_inner * rows, (self.view(tensor),))) for tensor in (q, k))
        size = F32 * (w.ssm_inner * rows + w.ssm_state * w.n_seq * (1 + w.n_draft))
        result = Tensor(size, (q, k, v, gate, beta, state))
        out = self.view(result)
        self.store(self.view(result))
        layout = ("heads", w.ssm_inner, rows)
        normed = self.norm(out, w.ssm_inner, layout=layout)
        opened = self.over(self.view(z, layout), n_bytes=F32 * w.ssm_inner * rows)
        gated = self.over(normed, opened)
        return self.view(self.multiply("ssm_out", w.n_embd, self.view(gated)), (w.n_embd, rows))

    def own_gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads, rows = self.widths.ssm_heads, self.widths.n_rows
        size = F32 * heads * rows
        beta = self.over(self.view(self.multiply("ssm_beta", heads, hidden), (1, heads, rows)), n_bytes=size)
        alpha = self.over(self.view(self.multiply("ssm_alpha", heads, hidden), (heads, rows, 1)), self.vector(heads), n_bytes=size)
        return beta, self.view(self.over(self.over(alpha), self.vector(heads)))

    def joined_gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads, rows = self.widths.ssm_heads, self.widths.n_rows
        size = F32 * heads * rows
        both = self.view(self.multiply("ssm_ba", 2 * heads, hidden))
        beta = self.view(self.over(Tensor(size, (self.view(both),))))
        alpha = Tensor(size, (self.view(both),))
        return beta, self.view(self.over(self.over(self.over(alpha, self.vector(heads))), self.vector(heads)))

    def normed_heads(self, conv_out: Tensor) -> Tensor:
        """Source: build_gdn_l2_norm in src/models/models.h."""
        w = self.widths
        size = F32 * (w.conv_channels - w.ssm_inner) // 2 * w.n_rows
        plain = Tensor(size, (self.view(conv_out),), ("heads", size), reuses=True)
        return self.over(plain)

    def experts(self, hidden: Tensor, rows: int) -> Tensor:
        """Source: build_moe_ffn in src/llama-graph.cpp, build_layer_ffn in src/models/qwen35moe.cpp."""
        w, used = self.widths, self.widths.n_expert_used
        chances = self.over(self.multiply("ffn_gate_inp", w.n_expert, hidden, rows))
        chosen = self.view(Tensor(4 * w.n_expert * rows, (chances,)))
        weights = self.view(Tensor(F32 * used * rows, (self.view(chances), chosen)), (used, rows))
        total = self.over(Tensor(F32 * rows, (weights,)))
        scaled = self.view(self.over(weights, total, n_bytes=F32 * used * rows))
        self.graph.expand(scaled)
        given, wide = self.view(hidden), F32 * w.n_ff_expert * used * rows
        if "ffn_gate_up_exps" in self.in_ram:
            both = Tensor(2 * wide, (self.weight("ffn_gate_up_exps"), given, chosen))
            up, gate = self.view(both), self.view(both)
        else:
            up, gate = (Tensor(wide, (self.weight(f"ffn_{name}_exps"), given, chosen)) for name in ("up", "gate"))
        active = Tensor(wide, (gate, up))
        raw = Tensor(F32 * w.n_embd * used * rows, (self.weight("ffn_down_exps"), active, chosen))
        out = self.over(raw, scaled)
        self.graph.expand(out)
        parts = [self.view(out) for _ in range(used)]
        for part in parts:
            self.graph.expand(part)
        summed = parts[0]
        for part in parts[1:]:
            summed = self.add(summed, part, rows)
            self.graph.expand(summed)
        if w.keeps_experts and 1 < used <= MOST_SUMMED:
            self.graph.expand(Tensor(0, (raw, scaled), kind="dependency", root=raw))
        return self.add(summed, self.shared_expert(hidden, rows), rows) if w.n_ff_shared else summed

    def shared_expert(self, hidden: Tensor, rows: int) -> Tensor:
        out = self.wide(hidden, self.widths.n_ff_shared, rows, "_shexp")
        gate = self.over(self.multiply("ffn_gate_inp_shexp", 1, hidden, rows))
        return self.over(out, gate)

    def dense(self, hidden: Tensor, rows: int) -> Tensor:
        return self.wide(hidden, self.widths.n_ff, rows)

    def wide(self, hidden: Tensor, width: int, rows: int, suffix: str = "") -> Tensor:
        """up, gate, their product, down. Source: build_ffn in src/llama-graph.cpp."""
        up, gate = (self.multiply(f"ffn_{name}{suffix}", width, hidden, rows) for name in ("up", "gate"))
        return self.multiply(f"ffn_down{suffix}", self.widths.n_embd, Tensor(F32 * width * rows, (gate, up), (width, rows)), rows)
