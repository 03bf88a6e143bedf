"""The graph that llama.cpp builds for one batch, by sizes only: what it multiplies is of no interest, what is alive together is.

Each function names the one that it mirrors in llama.cpp; the order of operations is theirs, since places are taken in that order.
"""

from __future__ import annotations

from a3b_gguf.memory.allocate import Graph, Peaks, Tensor, peaks
from a3b_gguf.memory.blocks import Blocks
from a3b_gguf.memory.widths import F32, LayerKind, Widths


def model_peaks(widths: Widths, gpu: bool, in_ram: tuple[tuple[str, int], ...] = ()) -> Peaks:
    """Compute buffers of the model's own graph. in_ram: (name, bytes) of a layer's expert tensors, and of "output", that a GPU must
    copy over.

    Source: graph::graph of src/models/qwen35moe.cpp, qwen3next.cpp, qwen3moe.cpp and llama.cpp; llama_context::graph_reserve.
    """
    graph = Graph()
    blocks = Blocks(graph, widths, dict(in_ram))
    hidden = embedded(graph, widths)
    rows = widths.n_rows
    for i, kind in enumerate(widths.layers):
        last = i == len(widths.layers) - 1
        hidden, rows = layer(blocks, kind, hidden, widths.picks_early and last)
    blocks.leave()
    hidden = blocks.norm(hidden, widths.n_embd, rows)
    finish(blocks, hidden)
    return peaks(graph, gpu)


def mtp_peaks(widths: Widths, gpu: bool, in_ram: tuple[tuple[str, int], ...] = ()) -> Peaks:
    """Compute buffers of the MTP context's graph: one attention layer behind a projection of two hidden rows.

    Source: graph_mtp of src/models/qwen35moe.cpp.
    """
    graph = Graph()
    blocks = Blocks(graph, widths, dict(in_ram))
    size, layout = F32 * widths.n_embd * widths.n_rows, (widths.n_embd, widths.n_rows)
    tokens, given = Tensor(4 * widths.n_rows, kind="input"), Tensor(size, kind="input", layout=layout)
    looked_up = Tensor(size, (blocks.weight(), tokens), layout)
    looked_up.on_host = True
    first, second = blocks.norm(given, widths.n_embd), blocks.norm(looked_up, widths.n_embd)
    joined = Tensor(2 * size, (second, first), (2 * widths.n_embd, widths.n_rows))
    hidden = blocks.multiply("eh_proj", widths.n_embd, joined)
    hidden, rows = layer(blocks, widths.layers[-1], hidden, picks=False, expands=False)
    finish(blocks, blocks.norm(hidden, widths.n_embd, rows))
    return peaks(graph, gpu)


def embedded(graph: Graph, widths: Widths) -> Tensor:
    """Rows of the token embedding, which is always in RAM, beside a place for given embeddings. Source: build_inp_embd."""
    size, layout = F32 * widths.n_embd * widths.n_rows, (widths.n_embd, widths.n_rows)
    rows = Tensor(size, (Tensor(0, kind="kept"), Tensor(4 * widths.n_rows, kind="input")), layout)
    rows.on_host = True
    graph.expand(rows)
    graph.expand(Tensor(size, kind="input", layout=layout))
    return rows


def layer(blocks: Blocks, kind: LayerKind, before: Tensor, picks: bool, expands: bool = True) -> tuple[Tensor, int]:
    """One block and how many rows leave it. picks: only the rows that are asked for go on behind the attention."""
    widths = blocks.widths
    blocks.enter(kind)
    normed = blocks.norm(before, widths.n_embd)
    if widths.is_hybrid and expands:
        blocks.graph.expand(normed)
    inner = blocks.delta_net(normed) if kind.recurrent else blocks.attention(normed, kind.n_head_kv)
    rows = widths.n_rows
    if picks:
        rows = widths.n_outputs
        inner, before = (blocks.rows(tensor, rows) for tensor in (inner, before))
    residual = blocks.add(inner, before, rows)
    normed = blocks.norm(residual, widths.n_embd, rows)
    wide = blocks.experts(normed, rows) if kind.has_experts else blocks.dense(normed, rows)
    return blocks.add(wide, residual, rows), rows


def finish(blocks: Blocks, hidden: Tensor) -> None:
    """Logits of the rows that are asked for."""
    widths = blocks.widths
    if not widths.picks_early:
        hidden = blocks.rows(hidden, widths.n_outputs)
    blocks.graph.expand(Tensor(F32 * widths.n_vocab * widths.n_outputs, (blocks.weight("output"), hidden)))
