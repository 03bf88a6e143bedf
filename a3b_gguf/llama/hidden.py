"""Hidden rows of a context: what its last layer said of every token, and what an MTP block predicts from."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as C
import llama_cpp.llama_cpp_ext as X
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.load import Context


def keep_hidden(context: Context) -> None:
    """From now on a call leaves one hidden row for each of its rows, with logits or without.

    Not `masked`: rows of those with logits alone come out wrong as soon as a call has others too.
    """
    X.llama_set_embeddings_nextn(context.pointer, True, False)


def hidden_rows(context: Context, n_rows: int, n_embd: int) -> NDArray[np.float32]:
    """A copy of the hidden rows of the last call, float32 [n_rows, n_embd]."""
    pointer = X.llama_get_embeddings_nextn(context.pointer)
    array = (ctypes.c_float * (n_rows * n_embd)).from_address(ctypes.addressof(pointer.contents))
    return np.frombuffer(memoryview(array), np.float32).reshape(n_rows, n_embd).copy()


def n_states(context: Context) -> int:
    """Older recurrent states that the context keeps of each sequence."""
    return int(C.llama_n_rs_seq(context.pointer))
