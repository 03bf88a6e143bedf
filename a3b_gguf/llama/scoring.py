"""Logits of the second half of chunks of text: what perplexity and KL divergence are computed from.

Mirrors `perplexity` in tools/perplexity/perplexity.cpp of llama.cpp: the text is cut into chunks of n_ctx tokens, the first token of
each becomes BOS where the model adds one, and positions n_ctx/2 ... n_ctx-2 are scored, each against the token that follows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.batch import Batch, decode, drop
from a3b_gguf.llama.load import Context, LoadedModel, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab

N_UBATCH = 512
LOGIT_BYTES = 128 << 20  # of one block: with a vocabulary of 248,320 these are 128 positions


@dataclass(frozen=True, slots=True)
class Block:
    """Some scored positions of a chunk, in order. row: number of the first among the chunk's scored positions.

    logits: float32 [n, n_vocab], a view that the next block overwrites. following: int32 [n], the token after each position.
    """

    chunk: int
    row: int
    logits: NDArray[np.float32]
    following: NDArray[np.int32]


def n_scored(n_ctx: int) -> int:
    """Positions of a chunk that are scored."""
    return n_ctx - n_ctx // 2 - 1


def scored_blocks(model: LoadedModel, params: LoadParams, chunks: NDArray[np.int32]) -> Iterator[Block]:
    """Blocks of every chunk, in order. chunks: tokens, int32 [n_chunk, n_ctx]; params: their n_ctx and batch sizes are set here.

    Raises MachineLacks when llama.cpp cannot open the context or cannot decode.
    """
    n_ctx, vocab = chunks.shape[1], Vocab(model)
    step = max(16, min(N_UBATCH, n_scored(n_ctx), LOGIT_BYTES // (4 * vocab.n_tokens)))
    wanted = replace(params, n_ctx=-(-n_ctx // 256) * 256, n_seq_max=1, n_batch=N_UBATCH, n_ubatch=N_UBATCH, n_outputs_max=step)
    with open_context(model, wanted) as context:
        batch = Batch(N_UBATCH)
        for number, tokens in enumerate(chunks):
            drop(context, 0)
            given = tokens.copy()
            if vocab.add_bos:
                given[0] = vocab.bos
            first = n_ctx // 2
            for start in range(0, first, N_UBATCH):
                _decode(context, batch, given[start : min(start + N_UBATCH, first)], start, 0)
            for start in range(first, n_ctx - 1, step):
                stop = min(start + step, n_ctx - 1)
                _decode(context, batch, given[start:stop], start, stop - start)
                yield Block(number, start - first, _outputs(context, stop - start, vocab.n_tokens), tokens[start + 1 : stop + 1])


def _decode(context: Context, batch: Batch, tokens: NDArray[np.int32], start: int, outputs: int) -> None:
    batch.clear()
    batch.add(0, start, tokens.tolist(), outputs)
    status = decode(context, batch)
    if status:
        where = context.model.path
        raise MachineLacks(f"llama.cpp cannot decode on {where}: llama_decode returned {status}", "look at the memory that is free")


def _outputs(context: Context, n_rows: int, n_vocab: int) -> NDArray[np.float32]:
    """Logits of all rows of the last batch, which all had outputs: float32 [n_rows, n_vocab], a view."""
    pointer = C.llama_get_logits_ith(context.pointer, 0)  # rows lie one behind the other: llama_get_logits in llama.h
    array = (ctypes.c_float * (n_rows * n_vocab)).from_address(ctypes.addressof(pointer.contents))
    return np.frombuffer(memoryview(array), np.float32).reshape(n_rows, n_vocab)
