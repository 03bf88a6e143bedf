"""What a place for texts that no slot holds any more must be able to do: RAM (`text_memory`) and a folder on disk (`state_folder`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def parts_of(memory: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Stretches of these sizes, one behind the other."""
    ends = list(accumulate(sizes))
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class SavedText:
    """A text as it was in a slot. state: uint8, of the whole sequence; checkpoints: (tokens, uint8) of recurrent states, ascending, each
    with the hidden row of its last token behind it where there was one. n_exact: leading tokens that were read in whole aligned chunks.
    drafts: what the drafter needs to go on; empty when it has nothing.
    """

    tokens: list[int]
    n_exact: int
    state: Bytes
    checkpoints: tuple[tuple[int, Bytes], ...] = ()
    drafts: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def states(self) -> tuple[Bytes, ...]:
        """All that lies in the memory of a store."""
        return (self.state, self.drafts, *(state for _, state in self.checkpoints))

    @property
    def n_bytes(self) -> int:
        """About what it takes."""
        return 4 * len(self.tokens) + sum(map(len, self.states)) + 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored text that can be brought back. checkpoints: token counts from which a hybrid can go on, its end not among them."""

    name: str
    tokens: list[int]
    n_exact: int
    checkpoints: tuple[int, ...]


def entry_of(name: str, text: SavedText) -> Entry:
    return Entry(name, text.tokens, text.n_exact, tuple(count for count, _ in text.checkpoints))


class TextStore(Protocol):
    """Owns stored texts. entries: those that can be brought back. outlives: they are still there when the process has ended."""

    outlives: bool

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    @property
    def is_busy(self) -> bool:
        """Whether the text before is still on its way."""

    def room(self, n_bytes: int, spared: Entry | None = None) -> Bytes | None:
        """Memory for the states of the text that is saved next; None where there is not so much without giving up `spared`."""

    def save(self, text: SavedText) -> bool:
        """Keeps a text, whose states lie in what `room` gave last. False: it is larger than all the room there is."""

    def load(self, entry: Entry) -> SavedText | None:
        """The text, good until the next `room`; None when it is not what it was."""

    def close(self) -> None: ...
