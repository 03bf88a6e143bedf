"""The answer's text on its way out: whitespace at borders is held back, and code fences are noticed, since calls in them are quoted."""

from __future__ import annotations

from typing import Literal

# What came before the text that is to come: nothing, the end of the reasoning, a call, or text.
Before = Literal["nothing", "reasoning", "call", "text"]


class ContentTail:
    """Owns the whitespace that is not out yet, and whether a code fence is open."""

    def __init__(self) -> None:
        self.before: Before = "nothing"
        self.in_fence = False
        self._blank: list[str] = []
        self._line_start = ""  # first three characters of the line

    def add(self, text: str) -> str:
        """What of it can go out now."""
        if self.before != "text":
            if not text or text.isspace():
                self._blank.append(text)
                return ""
            text = "".join((*self._blank, text))
            if self.before != "nothing":
                text = text.lstrip("\r\n")
            self._blank, self.before = [], "text"
        self._watch(text)
        return text

    def border(self, before: Before) -> None:
        """The reasoning or a call has ended here; whitespace between the two is nobody's text."""
        self._blank, self.before, self._line_start = [], before, ""

    def finish(self) -> str:
        """What is left when nothing more comes: an answer of whitespace alone is still an answer."""
        return "".join(self._blank) if self.before == "nothing" else ""

    def _watch(self, text: str) -> None:
        for index, piece in enumerate(text.split("\n")):
            if index:
                self.in_fence ^= self._line_start == "```"
                self._line_start = ""
            if len(self._line_start) < 3:
                self._line_start = (self._line_start + piece.lstrip(" \t") if not self._line_start else self._line_start + piece)[:3]
