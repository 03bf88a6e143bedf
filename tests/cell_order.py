"""A text in a fresh context whose cache has its cells in the order that another one has them in.

With flash attention on a CPU attention adds up in f16, in the order of the cells (ggml_compute_forward_flash_attn_ext_f16), so a right row
depends on that order: by rounding, and by much where the router's choice is a near tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.batch import Batch, decode, logits
from a3b_gguf.llama.load import Context, LoadedModel, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.sequences import load_state, save_state, state_size
from a3b_gguf.llama.vocab import Vocab

WHOLE = 0  # llama_state_seq_flags: the attention part, too
HEADER = 8
CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("ext", "<i4", 3), ("seq", "<i4")])  # with the three numbers of multi-section positions
N_ROWS = 128


@dataclass(frozen=True)
class Cells:
    """Where the parts of a saved sequence are. blocks: (first byte, bytes of a row) of K and V of each layer."""

    cells: NDArray[np.void]
    at: int
    blocks: tuple[tuple[int, int], ...]


def saved(context: Context, seq: int) -> NDArray[np.uint8]:
    state = np.zeros(state_size(context, seq, WHOLE), np.uint8)
    assert save_state(context, seq, state, WHOLE) == len(state)
    return state


def parsed(state: NDArray[np.uint8]) -> Cells:
    """Source: llama_kv_cache::state_write_meta and state_write_data in src/llama-kv-cache.cpp, for a cache of one stream."""
    raw = state.tobytes()
    n_streams, n_cells = np.frombuffer(raw, "<u4", 2, HEADER)
    at = HEADER + 8
    cells = np.frombuffer(raw, CELL, n_cells, at)
    assert n_streams == 1
    assert (cells["n_seq"] == 1).all()
    place = at + cells.nbytes
    v_transposed, n_layer = np.frombuffer(raw, "<u4", 2, place)
    assert not v_transposed
    place, blocks = place + 8, list[tuple[int, int]]()
    for _ in range(2 * int(n_layer)):
        row = int(np.frombuffer(raw, "<u8", 1, place + 4)[0])
        blocks.append((place + 12, row))
        place += 12 + row * int(n_cells)
    return Cells(cells, at, tuple(blocks))


def cell_order(context: Context, seq: int) -> list[int]:
    """Positions of a sequence's tokens, in the order of their cells."""
    return [int(pos) for pos in parsed(saved(context, seq)).cells["pos"]]


def logits_in_order(model: LoadedModel, tokens: list[int], order: list[int]) -> NDArray[np.float32]:
    """Logits behind `tokens`, float32 [n_vocab]: all but the last are read into a fresh context and put in order, then the last is read."""
    n = len(tokens) - 1
    params = LoadParams(2048, n_batch=N_ROWS, n_ubatch=N_ROWS, n_threads=1, n_threads_batch=1)
    with open_context(model, params) as context:
        batch = Batch(N_ROWS)
        for start in range(0, n, N_ROWS):
            batch.clear()
            batch.add(0, start, tokens[start : min(n, start + N_ROWS)], 0)
            assert decode(context, batch) == 0
        state = saved(context, 0)
        found = parsed(state)
        wanted = np.array([pos for pos in order if pos < n])
        assert sorted(wanted) == list(range(n))
        state[found.at : found.at + found.cells.nbytes] = np.frombuffer(found.cells[wanted].tobytes(), np.uint8)
        for place, row in found.blocks:
            rows = state[place : place + n * row].reshape(n, row)
            rows[:] = rows[wanted]
        assert load_state(context, 0, state, WHOLE)
        batch.clear()
        row = batch.add(0, n, [tokens[n]], 1)
        assert decode(context, batch) == 0
        return logits(context, row, Vocab(model).n_tokens).copy()
