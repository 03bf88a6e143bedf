"""Rows for llama_decode, filled by slices instead of element by element, and checked before C sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.load import Context


class Batch:
    """A llama_batch of up to `n_rows` rows over numpy arrays, which it owns; nothing to free.

    hidden: float32 [n_rows, n_embd], rows that an MTP block reads beside the tokens; for other contexts n_embd is 0.
    """

    def __init__(self, n_rows: int, n_embd: int = 0) -> None:
        self.token, self.pos, self.seq = (np.zeros(n_rows, np.int32) for _ in range(3))
        self.hidden = np.zeros((n_rows, n_embd), np.float32)
        self.n_seq, self.output = np.ones(n_rows, np.int32), np.zeros(n_rows, np.int8)
        # llama_batch.seq_id is an array of pointers, one a row; row i points at seq[i].
        self._seq_pointers = (self.seq.ctypes.data + self.seq.itemsize * np.arange(n_rows)).astype(np.uintp)
        self.struct: Any = C.llama_batch()
        types = dict(C.llama_batch._fields_)
        columns: dict[str, NDArray[Any]] = {
            "token": self.token,
            "pos": self.pos,
            "n_seq_id": self.n_seq,
            "seq_id": self._seq_pointers,
            "logits": self.output,
            **({"embd": self.hidden} if n_embd else {}),
        }
        for name, values in columns.items():
            setattr(self.struct, name, ctypes.cast(values.ctypes.data, types[name]))

    def __len__(self) -> int:
        return int(self.struct.n_tokens)

    @property
    def room(self) -> int:
        return len(self.token) - len(self)

    def clear(self) -> None:
        self.struct.n_tokens = 0

    def add(self, seq: int, pos: int, tokens: Sequence[int], outputs: int) -> int:
        """Appends rows of one sequence from position `pos` on; the last `outputs` of them give logits. Returns the last row's index.

        Raises ValueError when they do not fit: a longer batch than the context's would abort the process.
        """
        start, count = len(self), len(tokens)
        if count < 1 or count > self.room or not 0 <= outputs <= count:
            raise ValueError(f"{count} rows with {outputs} outputs do not fit: {self.room} of {len(self.token)} rows are free")
        stop = start + count
        self.token[start:stop], self.seq[start:stop], self.output[start:stop] = tokens, seq, 0
        self.pos[start:stop] = np.arange(pos, pos + count)
        self.output[stop - outputs : stop] = 1
        self.struct.n_tokens = stop
        return stop - 1


def decode(context: Context, batch: Batch) -> int:
    """Runs the batch. 0: done. 1: no room in the cache, nothing changed. 2: aborted. -1: refused, nothing changed. -2, -3: failed.

    After 2, -2 and -3 every sequence of the batch must be dropped. Logits of a call before stay readable after a failure, so
    look at the result first.
    """
    return int(C.llama_decode(context.pointer, batch.struct))


def logits(context: Context, row: int, n_vocab: int) -> NDArray[np.float32]:
    """Logits of a row of the last batch, float32 [n_vocab]: a view that the next call of decode overwrites."""
    pointer = C.llama_get_logits_ith(context.pointer, row)
    # A third of the time of np.ctypeslib.as_array, once a token.
    return np.frombuffer(memoryview((ctypes.c_float * n_vocab).from_address(ctypes.addressof(pointer.contents))), np.float32)


def drop(context: Context, seq: int) -> None:
    """Forgets a sequence as a whole, which always succeeds. Hybrids cannot forget a part."""
    C.llama_memory_seq_rm(context.memory, seq, -1, -1)


def last_position(context: Context, seq: int) -> int:
    """The largest position that the cache holds of `seq`, -1 when it holds none."""
    return int(C.llama_memory_seq_pos_max(context.memory, seq))
