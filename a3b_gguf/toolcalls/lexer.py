"""Text in, tags and text out, at once and once only: what could still become a tag is held back, nothing is read twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "think", "/think", "call", "/call", "function", "/function", "parameter", "/parameter", "bad parameter", "stray"]

FIXED: dict[str, Kind] = {
    "<think>": "think", "</think>": "/think", "<tool_call>": "call", "</tool_call>": "/call", "</function>": "/function",
    "</parameter>": "/parameter", "</function_invocation>": "stray",
}  # fmt: skip
NAME = r"[^<>\n]{1,128}"
TAG = re.compile(
    "|".join(re.escape(tag) for tag in FIXED)
    + rf"|<function=(?P<function>{NAME})>|<parameter=(?P<parameter>{NAME})>"
    + r"|<parameter=(?=[^<>\n]{0,128}[<\n]|>|[^<>\n]{129})"  # can no longer become an opener: `<parameter=` and a line's end
)
PARTIAL = re.compile(rf"<(?:function|parameter)=(?:{NAME})?")


@dataclass(frozen=True, slots=True)
class Token:
    """kind; raw: as it was written; name: of a function or parameter.

    at_line_start: only blanks stand before it on its line. quoted: a backtick stands right before it.
    """

    kind: Kind
    raw: str
    name: str = ""
    at_line_start: bool = False
    quoted: bool = False

    @property
    def is_blank(self) -> bool:
        return self.kind == "text" and self.raw.isspace()


class Lexer:
    """Owns the few characters at the end that may be the start of a tag, and where on its line the text has come to."""

    def __init__(self) -> None:
        self._held = ""
        self._blank_line = True
        self._last = ""

    def feed(self, text: str) -> Iterator[Token]:
        """Every token that is complete now. A run of text may come in any number of pieces."""
        text = self._held + text
        at = 0
        for match in TAG.finditer(text):
            if match.start() > at:
                yield self._text(text[at : match.start()])
            yield self._tag(match)
            at = match.end()
        rest = text[at:]
        last = rest.rfind("<")
        cut = last if last >= 0 and _may_become_tag(rest[last:]) else len(rest)
        self._held = rest[cut:]
        if cut:
            yield self._text(rest[:cut])

    def finish(self) -> Iterator[Token]:
        """What was held back, as text: no more comes."""
        held, self._held = self._held, ""
        if held:
            yield self._text(held)

    def _text(self, raw: str) -> Token:
        line = raw.rpartition("\n")
        self._blank_line = (self._blank_line or bool(line[1])) and not line[2].strip()
        self._last = raw[-1]
        return Token("text", raw)

    def _tag(self, match: re.Match[str]) -> Token:
        raw, name = match[0], match["function"] or match["parameter"] or ""
        kind: Kind = FIXED.get(raw) or ("function" if match["function"] else "parameter" if match["parameter"] else "bad parameter")
        token = Token(kind, raw, name.strip(), self._blank_line, self._last == "`")
        self._blank_line, self._last = False, ">"
        return token


def _may_become_tag(text: str) -> bool:
    """Whether more characters could make `text`, which starts with "<" and has no other, a tag."""
    if PARTIAL.fullmatch(text):
        return True
    return any(tag.startswith(text) for tag in (*FIXED, "<function=", "<parameter="))
