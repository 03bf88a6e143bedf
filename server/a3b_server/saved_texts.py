"""Texts that slots held, in RAM or on disk: saved when a slot is needed for another text and, to a disk, when the server stops; brought
back when a request goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from a3b_gguf.llama.batch import drop, last_position
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.sequences import WHOLE, load_state, save_state, state_size
from a3b_server.checkpoints import Checkpoint, CheckpointPool
from a3b_server.drafts import Drafter
from a3b_server.prefixes import Holding, Reuse, common_length
from a3b_server.text_store import Entry, SavedText, TextStore, parts_of

LEAST_TOKENS = 128  # shorter texts are read again as fast
WORTH_TOKENS = 64  # that must be saved beside what the cache holds already
LEAST_SHARE = 16  # of a text, one in so many tokens, that must be of use: all of it is copied
MOST_CHECKPOINTS = 4  # of a text: the first, which many texts share, and the last ones


class SavedTexts:
    """Owns what of `context` goes to `store` and back. Everything is done between two calls, but writing to a disk, which a thread does."""

    def __init__(self, context: Context, store: TextStore, checkpoints: CheckpointPool, drafter: Drafter | None = None) -> None:
        self._context, self._store, self._checkpoints, self._drafter = context, store, checkpoints, drafter

    def __len__(self) -> int:
        return len(self._store.entries)

    def keep(self, held: Holding, spared: Entry | None = None) -> bool:
        """Saves what an idle slot holds, where it is worth it, and not at the price of `spared`."""
        return not self._store.is_busy and self._keep(held, spared)

    def keep_last(self, held: Holding) -> None:
        """The process ends: saves what is there afterwards, also when the text before it is still being written."""
        if self._store.outlives:
            self._keep(held, None)

    def _keep(self, held: Holding, spared: Entry | None) -> bool:
        tokens = held.tokens
        if len(tokens) < LEAST_TOKENS or self._is_there(tokens):
            return False
        found = sorted((c for c in self._checkpoints.of(tokens) if c.n_tokens < len(tokens)), key=lambda c: c.n_tokens)
        chosen = [*found[:1], *found[1:][-(MOST_CHECKPOINTS - 1) :]]
        drafts_size = self._drafter.stored_bytes(held.seq) if self._drafter else 0
        sizes = [state_size(self._context, held.seq, WHOLE), drafts_size, *(len(c.state) + _hidden_size(c) for c in chosen)]
        memory = self._store.room(sum(sizes), spared)
        if memory is None:
            return False
        state, drafts, *copies = parts_of(memory, sizes)
        if save_state(self._context, held.seq, state, WHOLE) != len(state):
            return False
        if self._drafter is not None and drafts_size:
            self._drafter.store(held.seq, drafts)
        for copy, checkpoint in zip(copies, chosen, strict=True):
            copy[: len(checkpoint.state)] = checkpoint.state
            if checkpoint.hidden is not None:
                copy[len(checkpoint.state) :] = checkpoint.hidden.view(np.uint8)
        counts = (checkpoint.n_tokens for checkpoint in chosen)
        return self._store.save(SavedText(list(tokens), held.n_exact, state, tuple(zip(counts, copies, strict=True)), drafts))

    def _is_there(self, tokens: Sequence[int]) -> bool:
        return any(entry.tokens == tokens for entry in tuple(self._store.entries.values()))

    def better(self, prompt: list[int], n_tokens: int, reuse: Reuse) -> Entry | None:
        """The saved text from which more of the prompt need not be read than the n_tokens that the cache has; None when none is."""
        best, most = None, n_tokens + WORTH_TOKENS - 1
        for entry in tuple(self._store.entries.values()):
            count = _length(prompt, entry, reuse)
            if count > most and count * LEAST_SHARE >= len(entry.tokens):
                best, most = entry, count
        return best

    def bring_back(self, entry: Entry, seq: int, make_room: Callable[[], bool]) -> Holding | None:
        """Fills the empty slot `seq`, and the pool with the text's checkpoints. make_room: drops something else; False: nothing is left.

        None: the slot is empty, because the text is damaged or the cache has no room.
        """
        text = self._store.load(entry)
        if text is None:
            return None
        while not load_state(self._context, seq, text.state, WHOLE) or last_position(self._context, seq) != len(text.tokens) - 1:
            drop(self._context, seq)
            if not make_room():
                return None
        for count, state in text.checkpoints:
            checkpoint = self._checkpoints.take(text.tokens[:count])
            if checkpoint is not None and len(state) >= len(checkpoint.state):
                size = len(checkpoint.state)
                checkpoint.state[:] = state[:size]
                checkpoint.hidden = state[size:].copy().view(np.float32) if len(state) > size else None
        if self._drafter is not None:
            self._drafter.bring_back(seq, len(text.tokens), text.drafts)
        return Holding(seq, text.tokens, n_exact=text.n_exact)

    def close(self) -> None:
        """Waits for what is being written."""
        self._store.close()


def _hidden_size(checkpoint: Checkpoint) -> int:
    return 0 if checkpoint.hidden is None else checkpoint.hidden.nbytes


def _length(prompt: list[int], entry: Entry, reuse: Reuse) -> int:
    """As Reuse.length, for a text that is not in the cache."""
    common = min(common_length(prompt, entry.tokens), len(prompt) - 1)
    if reuse.aligned:
        common = min(common, entry.n_exact) // reuse.aligned * reuse.aligned
    if not reuse.is_recurrent or (common == len(entry.tokens) and not reuse.aligned):
        return common
    return max((count for count in entry.checkpoints if count <= common), default=0)
