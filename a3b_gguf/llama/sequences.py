"""Parts of sequences in a context's memory: copied, cut, saved and brought back. Whole ones are dropped by `batch.drop`.

A recurrent state belongs to one point of a sequence and cannot be cut. The order of calls that is right for hybrids, and what goes
wrong silently with any other, was measured: every function here says what must hold.
"""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.load import Context

RECURRENT_ONLY = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY  # without the attention part, which stays in the cache
WHOLE = 0  # attention rows and recurrent state


def copy(context: Context, source: int, target: int) -> None:
    """Makes `target` equal to `source`; attention rows are shared where the cache is unified. Always whole: a part of a hybrid would be
    wrong without a word, and of a split cache ends the process. `target` must be empty.

    In a split cache the rows are copied at the start of the next call of decode, as they are then: until it, nothing may be loaded into
    either sequence, and `target` cannot be saved.

    A source that was cut back after a verify call, and has not been decoded since, gives the state before the cut: `load_state` into the
    target must follow then.
    """
    C.llama_memory_seq_cp(context.memory, source, target, -1, -1)


def cut(context: Context, seq: int, n_tokens: int) -> bool:
    """Forgets everything from position n_tokens on. False: a recurrent state cannot go back so far, and nothing was changed.

    On a hybrid it is right only directly after a call in which the sequence had more rows than are cut and nothing else but rows of
    that kind, or directly after `load_state`.
    """
    return bool(C.llama_memory_seq_rm(context.memory, seq, n_tokens, -1))


def state_size(context: Context, seq: int, flags: int = RECURRENT_ONLY) -> int:
    """Bytes that `save_state` would write for a sequence that holds something."""
    return int(C.llama_state_seq_get_size_ext(context.pointer, seq, flags))


def save_state(context: Context, seq: int, buffer: NDArray[np.uint8], flags: int = RECURRENT_ONLY) -> int:
    """Writes the state of `seq` into `buffer`, uint8 [at least state_size], and returns its size; 0: it did not fit."""
    return int(C.llama_state_seq_get_data_ext(context.pointer, _bytes(buffer), len(buffer), seq, flags))


def load_state(context: Context, seq: int, state: NDArray[np.uint8], flags: int = RECURRENT_ONLY) -> bool:
    """Brings a saved state back into `seq`, which may be another than it was saved from.

    A recurrent state needs the attention rows of its tokens to be in `seq`, and `cut` to the same number of tokens must follow before
    anything is decoded. False: the sequence is in pieces and must be dropped.
    """
    return int(C.llama_state_seq_set_data_ext(context.pointer, _bytes(state), len(state), seq, flags)) == len(state)


def _bytes(array: NDArray[np.uint8]) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * len(array)).from_address(array.ctypes.data)
