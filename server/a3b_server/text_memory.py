"""Texts in RAM that no slot holds any more: what lies between a chat and its next turn when others need its slot meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from a3b_server.text_store import Bytes, Entry, SavedText, entry_of


@dataclass(slots=True)
class _Place:
    """Where the states of a text lie. used: when it was last needed."""

    start: int
    stop: int
    text: SavedText
    used: int


class TextMemory:
    """Owns a fixed amount of memory, taken and touched at the start; texts that were not used for the longest time give way."""

    outlives = False
    is_busy = False

    def __init__(self, n_bytes: int) -> None:
        self._memory = np.empty(n_bytes, np.uint8)
        self._memory.fill(0)
        self._places: dict[str, _Place] = {}
        self._next = 0  # where `room` has made some
        self._clock = 0

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {name: entry_of(name, place.text) for name, place in self._places.items()}

    def room(self, n_bytes: int, spared: Entry | None = None) -> Bytes | None:
        kept = self._places.get(spared.name) if spared else None
        if n_bytes > (max(kept.start, len(self._memory) - kept.stop) if kept else len(self._memory)):
            return None
        while (start := self._gap(n_bytes)) is None:
            others = (name for name, place in self._places.items() if place is not kept)
            del self._places[min(others, key=lambda name: self._places[name].used)]
        self._next = start
        return self._memory[start : start + n_bytes]

    def _gap(self, n_bytes: int) -> int | None:
        """The first place where so many bytes lie free together."""
        at = 0
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - at >= n_bytes:
                return at
            at = place.stop
        return at if len(self._memory) - at >= n_bytes else None

    def save(self, text: SavedText) -> bool:
        for name in [name for name, place in self._places.items() if text.tokens[: len(place.text.tokens)] == place.text.tokens]:
            del self._places[name]  # the new one goes on from it
        self._clock += 1
        stop = self._next + sum(map(len, text.states))
        self._places[str(self._clock)] = _Place(self._next, stop, text, self._clock)
        return True

    def load(self, entry: Entry) -> SavedText | None:
        place = self._places.get(entry.name)
        if place is None:
            return None
        self._clock += 1
        place.used = self._clock
        return place.text

    def close(self) -> None: ...
