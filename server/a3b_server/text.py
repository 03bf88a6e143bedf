"""Tokens to text while they come: characters that are split over tokens, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text that will not change any more.

    A character whose bytes are not all there yet is held back, and so is text that may become a stop string. Stop strings are
    looked for in everything that the model writes: reasoning, answer and tool calls. The one found is not part of the text.
    """

    def __init__(self, piece: Callable[[int], bytes], stop: Sequence[str]) -> None:
        self._piece, self._stop = piece, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain after this token; sets `stopped` when a stop string is complete."""
        return self._release(self._decoder.decode(self._piece(token)))

    def finish(self) -> str:
        """The rest. Bytes that never became a character are replaced by U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, new: str) -> str:
        text = self._held + new
        found = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped, self._held = True, ""
            return text[:found]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
