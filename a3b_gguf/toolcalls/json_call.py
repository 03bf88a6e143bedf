"""Reads a call in Hermes form: `{"name": ..., "arguments": {...}}`, once or several times, up to `</tool_call>`.

Where an object ends is found by counting braces outside of strings, so a `</tool_call>` inside a string is text.
"""

from __future__ import annotations

import re

from a3b_gguf.toolcalls.block import NO_CALL_CLOSE, Ended, raw_of
from a3b_gguf.toolcalls.build import Built, call_of_json
from a3b_gguf.toolcalls.events import Diagnostic
from a3b_gguf.toolcalls.json_stream import JSONStream
from a3b_gguf.toolcalls.lexer import Token
from a3b_gguf.toolcalls.tools import Tools

OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
CLOSERS = re.compile(r"\s*[}\]][}\]\s]*")
MALFORMED = Diagnostic("O021", "a closing bracket too many was left out")
UNBALANCED = Diagnostic("O012", "the call is not JSON: its braces or quotes do not close")


class JsonCall:
    """Owns the place in the JSON: how deep, and whether inside a string. The first token given to it starts with a brace."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.taken: list[Token] = []
        self._objects: list[str] = []
        self._pieces: list[str] = []  # of the object that is open
        self._blank: list[Token] = []  # whitespace behind a whole object, and brackets too many
        self._remarks: tuple[Diagnostic, ...] = ()
        self._depth, self._in_string, self._escaped = 0, False, False
        self._cuts: list[int] = []  # tokens up to each </tool_call> that stood inside a string
        self._behind_cut = False
        self._stream = JSONStream(tools)  # of the first object

    @property
    def name(self) -> str:
        return self._stream.name

    def progress(self) -> str:
        return self._stream.take()

    def take(self, token: Token) -> Ended | None:
        if self._depth == 0 and self._objects:
            return self._between(token)
        if token.kind == "call" and self._behind_cut:  # no string goes on like that: a quote was missing
            return self._failed(self._cuts[-1], (token,))
        self.taken.append(token)
        if token.kind == "/call":
            if not self._in_string:
                return self._failed(len(self.taken), ())
            self._cuts.append(len(self.taken))
        self._behind_cut = token.kind == "/call" or (self._behind_cut and token.is_blank)
        return self._read(token.raw)

    def finish(self) -> Ended | None:
        if self._depth == 0 and self._objects:
            return self._ended((NO_CALL_CLOSE,), tuple(self._blank))
        return self._failed(self._cuts[0], ()) if self._cuts else None

    def _between(self, token: Token) -> Ended | None:
        """Behind a whole object: another one, the end of the block, or something that is not ours."""
        if token.is_blank:
            self._blank.append(token)
            return None
        another = token.kind == "text" and token.raw.lstrip().startswith("{")
        if token.kind == "text" and CLOSERS.fullmatch(token.raw):
            self._remarks = (MALFORMED,)
            self._blank.append(token)
            return None
        if not another and token.kind != "/call":
            return self._ended((NO_CALL_CLOSE,), (*self._blank, token))
        self.taken += [*self._blank, token]
        self._blank = []
        return self._read(token.raw) if another else self._ended((), ())

    def _read(self, text: str) -> Ended | None:
        end = self._end_of_object(text)
        if not self._objects and not self._cuts:  # behind a </tool_call> in a string it is not certain that it was in a string
            self._stream.feed(text[:end])
        if end is None:
            self._pieces.append(text)
            return None
        self._objects.append("".join((*self._pieces, text[:end])))
        self._pieces = []
        if end == len(text):
            return None
        self.taken[-1] = Token("text", text[:end])
        return self._between(Token("text", text[end:]))

    def _end_of_object(self, text: str) -> int | None:
        """Where the outermost object ends in `text`, the next piece."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (INSIDE if self._in_string else OUTSIDE).search(text, at)
            if match is None:
                return None
            at, found = match.end(), match[0]
            if found == '"':
                self._in_string = not self._in_string
            elif found == "\\":
                self._escaped = True
            else:
                self._depth += 1 if found in "{[" else -1
                if self._depth == 0:
                    return at
        return None

    def _ended(self, remarks: tuple[Diagnostic, ...], rest: tuple[Token, ...]) -> Ended:
        calls = tuple((text.strip(), call_of_json(self._tools, text, may_repair=not remarks)) for text in self._objects)
        return Ended(calls, raw_of(self.taken), rest, (*self._remarks, *remarks))

    def _failed(self, upto: int, further: tuple[Token, ...]) -> Ended:
        """What was read up to a closer is one call all the same, if it can be mended."""
        raw = raw_of(self.taken[:upto])
        call = call_of_json(self._tools, raw_of(self.taken[: upto - 1]), may_repair=True)
        if call.is_call:
            return Ended(((raw, call),), raw, (*self.taken[upto:], *further))
        return Ended(((raw, Built(remarks=(UNBALANCED,))),), raw, (*self.taken[upto:], *further))
