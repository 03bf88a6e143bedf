"""Models that pool: a text goes in, one vector comes out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import Context, LoadedModel, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.memory.read import pooling_type

POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # enum llama_pooling_type of llama.h
RANK = 4
MOST_TOGETHER = 32  # texts in a call


def pooling_of(file: GGUFFile) -> str | None:
    """How the model of `file` pools, None for one that does not. Raises BadInput for a way that is not served."""
    value = pooling_type(file)
    if value is None:
        return None
    if value not in POOLINGS:
        what = "the model ranks documents, which is not served" if value == RANK else f"pooling_type {value} is not known"
        raise BadInput(f"{file.path}: {what}", "serve a chat model, or an embedding model that pools by mean, cls or last")
    return POOLINGS[value]


def open_pooling(model: LoadedModel, params: LoadParams) -> tuple[Context, LoadParams]:
    """A context that pools, and the parameters that it was opened with: more sequences, which cost nothing without a recurrent state, and
    an output row for every token. Raises what open_context raises."""
    n_seq = params.n_seq_max if model.is_hybrid else max(params.n_seq_max, min(MOST_TOGETHER, params.n_ubatch))
    rows = params.n_ubatch
    changed = replace(params, n_seq_max=n_seq, n_batch=rows, n_outputs_max=rows, kv_unified=True, n_draft=0)
    return open_context(model, changed, pools=True), changed


class Pooler:
    """Turns texts into vectors with `context`, which was opened to pool; whoever opened it closes it.

    most: tokens that a text may have: all rows that are pooled must be in one call, but where the last one is all that is asked for.
    Several texts share a call, but on models with a recurrent state, where llama.cpp would cut texts of different lengths into pieces
    and pool over the last piece alone.
    """

    def __init__(self, context: Context, params: LoadParams) -> None:
        self._context, self._n_rows = context, params.n_ubatch
        self._n_seq = 1 if context.model.is_hybrid else params.n_seq_max
        self._batch = Batch(self._n_rows)
        goes_on = bool(context.memory) and C.llama_pooling_type(context.pointer) == C.LLAMA_POOLING_TYPE_LAST
        self.most = min(context.n_ctx_seq if goes_on else self._n_rows, context.n_ctx_seq, context.model.n_ctx_train)
        self.n_embd = context.model.n_embd

    def fit(self, lengths: Sequence[int]) -> bool:
        """Whether texts of these lengths can be pooled together. One alone always can, when it is not longer than `most`."""
        return len(lengths) == 1 or (len(lengths) <= self._n_seq and sum(lengths) <= self._n_rows)

    def pool(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32] | None:
        """One vector of length 1 for each of the texts, which `fit`, float32 [n, n_embd]; None when a call failed."""
        if self._context.memory:  # encoders have none
            C.llama_memory_clear(self._context.memory, False)
        for start in range(0, max(map(len, texts)), self._n_rows):
            self._batch.clear()
            for seq, tokens in enumerate(texts):
                part = tokens[start : start + self._n_rows]
                self._batch.add(seq, start, part, len(part))
            if decode(self._context, self._batch):
                return None
        found = np.stack([self._vector(seq) for seq in range(len(texts))])
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        lengths[lengths == 0] = 1
        unit: NDArray[np.float32] = found / lengths
        return unit

    def _vector(self, seq: int) -> NDArray[np.float32]:
        pointer = C.llama_get_embeddings_seq(self._context.pointer, seq)
        array: Any = (ctypes.c_float * self.n_embd).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(array), np.float32).copy()
