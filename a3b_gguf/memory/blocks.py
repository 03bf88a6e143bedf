"""Attention, DeltaNet, experts and feed-forward part of a graph, by sizes only."""

from __future__ import annotations

from a3b_gguf.memory.allocate import Graph, Tensor
from a3b_gguf.memory.widths import F32, Widths


class Blocks:
    """Adds blocks to a graph. Owns the graph's inputs, which are made when a block first asks for them."""

    def __init__(self, graph: Graph, widths: Widths, in_ram: dict[str, int]) -> None:
        self.graph, self.widths, self.in_ram = graph, widths, in_ram
        self.positions = Tensor(4 * widths.n_rows * widths.n_sections, kind="input")
        self.k_index, self.v_index = (Tensor(8 * widths.n_rows, kind="input") for _ in "kv")
        self.mask = Tensor(widths.mask, kind="input")
        self.k_rotation, self.v_rotation = (Tensor(F32 * side * side, kind="input") for side in widths.rotated)
        self.states = Tensor(4 * widths.n_seq, kind="input")
        self.picked = Tensor(4 * widths.n_outputs, kind="input")

    def weight(self, name: str = "") -> Tensor:
        """A matrix that lies where it is used, or one of the experts that are in RAM."""
        return Tensor(self.in_ram[name], kind="copied") if name in self.in_ram else Tensor(0, kind="kept")

    def multiply(self, width: int, source: Tensor, rows: int | None = None) -> Tensor:
        rows = self.widths.n_rows if rows is None else rows
        return Tensor(F32 * width * rows, (self.weight(), source), (width, rows))

    def over(self, source: Tensor, *others: Tensor, layout: object = None, n_bytes: int = 0) -> Tensor:
        """The result of an operation that may be written over `source`."""
        return Tensor(n_bytes or source.n_bytes, (source, *others), layout or source.layout, reuses=True)

    def view(self, source: Tensor, layout: object = None) -> Tensor:
        return Tensor(0, (source,), layout, root=source.root or source)

    def norm(self, source: Tensor, width: int, rows: int | None = None, layout: object = None) -> Tensor:
        """rms_norm, then times its weight. Source: build_norm in src/llama-graph.cpp."""
        size = F32 * width * (self.widths.n_rows if rows is None else rows)
        plain = self.over(source, layout=layout, n_bytes=size)
        return self.over(plain, self.weight())

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
        q_full = self.multiply(2 * q_width if w.is_hybrid else q_width, hidden)
        k, v = self.multiply(k_width, hidden), self.multiply(v_width, hidden)
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
        cache = Tensor(0, kind="kept")
        mixed = Tensor(F32 * w.n_head * w.v_dim * rows, (self.view(self.view(q)), cache, cache, self.mask))
        out = self.view(mixed, (q_width, rows))
        self.graph.expand(out)
        if w.rotated[1]:
            out = self.rotate(out, w.n_head * w.v_dim, self.v_rotation)
        if gate is not None:
            out = Tensor(F32 * q_width * rows, (out, self.over(gate)), (q_width, rows), reuses=True)
        return self.multiply(w.n_embd, out)

    def rotate(self, source: Tensor, width: int, rotation: Tensor) -> Tensor:
        """Source: llama_mul_mat_hadamard in src/llama-graph.cpp."""
        return self.view(Tensor(F32 * width * self.widths.n_rows, (rotation, self.view(source))))

    def store(self, source: Tensor, *others: Tensor) -> None:
        """Written into a cache, which lies elsewhere."""
        cache = Tensor(0, kind="kept")
        self.graph.expand(Tensor(0, (source, *others, cache), kind="stored", root=cache))

    def state(self, size: int) -> Tensor:
        """States of all sequences, copied out of the cache. Source: build_rs in src/llama-graph.cpp."""
        states = Tensor(0, kind="kept")
        flat = self.view(states)
        self.graph.expand(Tensor(0, (self.view(flat),), kind="stored", root=states))
        main = Tensor(F32 * size * self.widths.n_seq, (flat, self.view(self.states)))
        self.graph.expand(main)
        extra = Tensor(0, (flat, self.view(self.states)))
        self.graph.expand(Tensor(0, (extra, self.view(states)), kind="stored", root=states))
        return main

    def delta_net(self, hidden: Tensor) -> Tensor:
        """Source: build_layer_attn_linear in src/models/qwen35moe.cpp and qwen3next.cpp, src/models/delta-net-base.cpp."""
        w, rows = self.widths, self.widths.n_rows
        mixed = self.view(self.multiply(w.conv_channels, hidden))
        z = self.multiply(w.ssm_inner, hidden)
        beta, gate = self.joined_gates(hidden) if w.joins_gates else self.own_gates(hidden)
        history = w.n_seq * w.conv_state // w.conv_channels
        conv_in = Tensor(F32 * w.conv_channels * (rows + history), (self.view(self.state(w.conv_state)), self.view(mixed)))
        for _ in range(1 + w.n_draft):
            self.store(self.view(conv_in))
        state = self.view(self.state(w.ssm_state))
        conv_out = self.over(Tensor(F32 * w.conv_channels * rows, (conv_in, self.weight())))
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
        return self.view(self.multiply(w.n_embd, self.view(gated)), (w.n_embd, rows))

    def own_gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads, rows = self.widths.ssm_heads, self.widths.n_rows
        size = F32 * heads * rows
        beta = self.over(self.view(self.multiply(heads, hidden), (1, heads, rows)), n_bytes=size)
        alpha = self.over(self.view(self.multiply(heads, hidden), (heads, rows, 1)), self.weight(), n_bytes=size)
        return beta, self.view(self.over(self.over(alpha), self.weight()))

    def joined_gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads, rows = self.widths.ssm_heads, self.widths.n_rows
        size = F32 * heads * rows
        both = self.view(self.multiply(2 * heads, hidden))
        beta = self.view(self.over(Tensor(size, (self.view(both),))))
        alpha = Tensor(size, (self.view(both),))
        return beta, self.view(self.over(self.over(self.over(alpha, self.weight())), self.weight()))

    def normed_heads(self, conv_out: Tensor) -> Tensor:
        """Source: build_gdn_l2_norm in src/models/models.h."""
        w = self.widths
        size = F32 * (w.conv_channels - w.ssm_inner) // 2 * w.n_rows
        plain = Tensor(size, (self.view(conv_out),), ("heads", size), reuses=True)
        return self.over(plain)

    def experts(self, hidden: Tensor, rows: int) -> Tensor:
        """Source: build_moe_ffn in src/llama-graph.cpp, build_layer_ffn in src/models/qwen35moe.cpp."""
        w, used = self.widths, self.widths.n_expert_used
        chances = self.over(self.multiply(w.n_expert, hidden, rows))
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
        out = Tensor(F32 * w.n_embd * used * rows, (self.weight("ffn_down_exps"), active, chosen))
        out = self.over(out, scaled)
        self.graph.expand(out)
        parts = [self.view(out) for _ in range(used)]
        for part in parts:
            self.graph.expand(part)
        summed = parts[0]
        for part in parts[1:]:
            summed = self.add(summed, part, rows)
            self.graph.expand(summed)
        return self.add(summed, self.shared_expert(hidden, rows), rows) if w.n_ff_shared else summed

    def shared_expert(self, hidden: Tensor, rows: int) -> Tensor:
        out = self.wide(hidden, self.widths.n_ff_shared, rows)
        gate = self.over(self.multiply(1, hidden, rows))
        return self.over(out, gate)

    def dense(self, hidden: Tensor, rows: int) -> Tensor:
        return self.wide(hidden, self.widths.n_ff, rows)

    def wide(self, hidden: Tensor, width: int, rows: int) -> Tensor:
        """up, gate, their product, down. Source: build_ffn in src/llama-graph.cpp."""
        up, gate = self.multiply(width, hidden, rows), self.multiply(width, hidden, rows)
        return self.multiply(self.widths.n_embd, Tensor(F32 * width * rows, (gate, up), (width, rows)), rows)
