"""Copies of recurrent states in RAM: the points of a text from which a hybrid can go on without reading it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 256  # more are not worth the search among them


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after `tokens`. state: uint8, a buffer of the pool; hidden: the target's hidden row of the last token, for MTP.

    used: when it last served, by the pool's clock.
    """

    tokens: list[int]
    state: NDArray[np.uint8]
    hidden: NDArray[np.float32] | None = None
    used: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class CheckpointPool:
    """Owns a fixed amount of memory, taken and touched at the start; the least recently used checkpoint gives way to a new one."""

    def __init__(self, state_bytes: int, budget: int) -> None:
        """state_bytes: of one state, which does not depend on the length of the text. budget: bytes of all; may be too few for one."""
        n_states = min(MOST, budget // state_bytes) if state_bytes else 0
        memory = np.zeros((n_states, state_bytes), np.uint8)
        memory.fill(1)  # the pages of zeros exist only once they are written to, and that takes longer than a copy
        self._free = list(memory)
        self._held: list[Checkpoint] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def n_most(self) -> int:
        return len(self._held) + len(self._free)

    def find(self, tokens: Sequence[int], most: int) -> Checkpoint | None:
        """The longest checkpoint of at most `most` tokens that `tokens` begins with."""
        for checkpoint in sorted(self._held, key=lambda c: -c.n_tokens):
            if checkpoint.n_tokens <= most and tokens[: checkpoint.n_tokens] == checkpoint.tokens:
                return checkpoint
        return None

    def of(self, tokens: Sequence[int]) -> list[Checkpoint]:
        """Every checkpoint that `tokens` begins with."""
        return [checkpoint for checkpoint in self._held if tokens[: checkpoint.n_tokens] == checkpoint.tokens]

    def take(self, tokens: list[int]) -> Checkpoint | None:
        """A checkpoint of `tokens` whose state is to be written; None when the pool has no room at all. It may be one that was there."""
        same = next((c for c in self._held if c.tokens == tokens), None)
        if same is not None:
            self.touch(same)
            return same
        if not self._free:
            if not self._held:
                return None
            self.discard(min(self._held, key=lambda c: c.used))
        checkpoint = Checkpoint(tokens, self._free.pop())
        self._held.append(checkpoint)
        self.touch(checkpoint)
        return checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        self._clock += 1
        checkpoint.used = self._clock

    def discard(self, checkpoint: Checkpoint) -> None:
        self._held.remove(checkpoint)
        self._free.append(checkpoint.state)
