"""Tokens that may come next, as samplers take them, over a numpy array instead of a list of structs."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data of llama.h


class Candidates:
    """Owns room for a whole vocabulary; every fill overwrites what was there."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._rows = np.zeros(n_vocab, RECORD)
        data = ctypes.cast(self._rows.ctypes.data, C.llama_token_data_p)
        self._struct = C.llama_token_data_array(data, n_vocab, -1, False)

    def fill(self, logits: NDArray[np.float32]) -> None:
        """All tokens, with their logits, float32 [n_vocab]."""
        self._rows["id"], self._rows["logit"] = self._ids, logits
        self._reset(len(self._ids))

    def fill_one(self, token: int) -> None:
        """This token alone."""
        self._rows[0] = (token, 1.0, 0.0)
        self._reset(1)

    def _reset(self, size: int) -> None:
        self._struct.size, self._struct.selected, self._struct.sorted = size, -1, False

    def apply(self, sampler: Any) -> None:
        """Runs a llama_sampler over the tokens; it may reorder them."""
        C.llama_sampler_apply(sampler, ctypes.byref(self._struct))

    def forbid(self, tokens: NDArray[np.int64]) -> None:
        """Refuses tokens. Only before a sampler has reordered them."""
        self._rows["logit"][tokens] = -np.inf

    @property
    def any_left(self) -> bool:
        """Whether not all tokens were refused."""
        return bool(np.isfinite(self._rows["logit"][: self._struct.size]).any())

    @property
    def selected(self) -> int:
        """The token that the last sampler of a chain chose."""
        return int(self._rows["id"][self._struct.selected])
