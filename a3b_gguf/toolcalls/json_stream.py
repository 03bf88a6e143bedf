"""Follows a call in Hermes form while it is written, so that long texts among its arguments go out in pieces.

It reads only what well-formed calls look like: the name first, then the arguments, strict JSON. Whatever else comes, it stops following;
what is out by then is still the beginning of what was written.
"""

from __future__ import annotations

import re
from typing import Literal

from a3b_gguf.strict_json import NotJSON, loads
from a3b_gguf.toolcalls.argument_stream import ArgumentStream
from a3b_gguf.toolcalls.build import Building
from a3b_gguf.toolcalls.tools import Tools

MOST_HEAD = 512  # characters up to the first argument, and of a member's name
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
KEY = re.compile(r'\s*,?\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*:')
MAYBE_KEY = re.compile(r'\s*,?\s*(?:"(?:[^"\\\x00-\x1f]|\\.)*(?:\\|"\s*)?)?')
SPECIAL = re.compile(r'["\\\x00-\x1f]')  # in a string: its end, an escape, or what strict JSON does not have
OUTSIDE = re.compile(r'["{}\[\],]')
HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")
# head: before the arguments. key: before or in a member's name. value: before a value. text: in a string that streams. ended: behind
# it. other: in any other value. over: nothing more is followed.
State = Literal["head", "key", "value", "text", "ended", "other", "over"]


class JSONStream:
    """Owns the place in one call. `take` gives what of its arguments has become certain."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._state: State = "head"
        self._held = ""  # characters of the head, of a key, or of an escape that is not whole
        self._building: Building | None = None
        self._stream: ArgumentStream | None = None
        self._key = ""
        self._text: list[str] = []  # of the value
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def name(self) -> str:
        return self._building.tool.name if self._building and self._building.tool else ""

    def take(self) -> str:
        return self._stream.take() if self._stream else ""

    def feed(self, text: str) -> None:
        """More of the call as it was written."""
        steps = {
            "head": self._head,
            "key": self._before_value,
            "value": self._value,
            "text": self._in_text,
            "ended": self._behind_text,
            "other": self._in_other,
        }
        while text and self._state != "over":
            text = steps[self._state](text)

    def _head(self, text: str) -> str:
        self._held += text
        match = HEAD.match(self._held[:MOST_HEAD])
        if match is None:
            if len(self._held) >= MOST_HEAD:
                self._state = "over"
            return ""
        rest, self._held = self._held[match.end() :], ""
        try:
            self._building = Building(self._tools, loads(match[1]))
        except NotJSON:
            self._state = "over"
            return ""
        self._stream = ArgumentStream(self._building)
        self._state = "over" if self._building.failed else "key"
        return rest

    def _before_value(self, text: str) -> str:
        """Up to the colon behind a member's name."""
        self._held += text
        match = KEY.match(self._held[:MOST_HEAD])
        if match is None:
            if len(self._held) >= MOST_HEAD or not MAYBE_KEY.fullmatch(self._held):
                self._state = "over"
            return ""
        rest, self._held = self._held[match.end() :], ""
        try:
            self._key = loads(match[1])
        except NotJSON:
            self._state = "over"
            return ""
        assert self._building is not None
        self._state = "over" if self._key in self._building.arguments else "value"
        return rest

    def _value(self, text: str) -> str:
        rest = text.lstrip(" \t\r\n")
        if not rest:
            return ""
        assert self._stream is not None
        self._text = []
        if rest[0] == '"' and self._stream.open_value(self._key, trims=False):
            self._state = "text"
            return rest[1:]
        self._state, self._depth, self._in_string, self._escaped = "other", 0, False, False
        return rest

    def _in_text(self, text: str) -> str:
        """A string, up to its end. An escape goes out when it is whole, and half of a surrogate pair with its other half."""
        text, self._held = self._held + text, ""
        at = 0
        while match := SPECIAL.search(text, at):
            if match[0] == '"':
                self._out(text[: match.start()])
                self._state = "ended" if self._state == "text" else "over"
                return text[match.end() :]
            n_escape = self._escape_length(text, match.start()) if match[0] == "\\" else -1
            if n_escape < 0:
                self._out(text[: match.start()])
                self._state = "over"
                return ""
            if match.start() + n_escape > len(text):
                self._out(text[: match.start()])
                self._held = text[match.start() :]
                return ""
            at = match.start() + n_escape
        self._out(text)
        return ""

    def _escape_length(self, text: str, at: int) -> int:
        """Characters of the escape that begins there; -1 when it is none."""
        kind = text[at + 1 : at + 2]
        if kind and kind not in '"\\/bfnrtu':
            return -1
        if kind != "u":
            return 2
        return 12 if HIGH_SURROGATE.match(text, at) else 6

    def _out(self, written: str) -> None:
        if not written:
            return
        try:
            piece = loads(f'"{written}"')
        except NotJSON:
            self._state = "over"
            return
        assert self._stream is not None
        self._text.append(piece)
        self._stream.text(piece)

    def _behind_text(self, text: str) -> str:
        """A quotation mark ends a string only before a comma or a closer; else a repair may take it for part of the text."""
        rest = text.lstrip(" \t\r\n")
        if not rest:
            return ""
        if rest[0] not in ",}":
            self._state = "over"
            return ""
        value = "".join(self._text)
        assert self._building is not None
        assert self._stream is not None
        is_in = self._building.add_json(self._key, value, False)
        self._stream.close_value(self._key, value, is_in)
        self._state = "key"
        return rest

    def _in_other(self, text: str) -> str:
        """Any other value: its end is a comma or a closer outside of it."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (SPECIAL if self._in_string else OUTSIDE).search(text, at)
            if match is None:
                break
            at = match.end()
            if self._ends_other(match[0]):
                self._text.append(text[: match.start()])
                return self._close_other(text[match.start() :])
        self._text.append(text)
        return ""

    def _ends_other(self, found: str) -> bool:
        """Goes on by a character that means something; whether it stands behind the value."""
        if found == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._escaped = found == "\\"
        elif found in "{[":
            self._depth += 1
        elif self._depth:
            self._depth -= found in "}]"
        else:
            return True
        return False

    def _close_other(self, rest: str) -> str:
        assert self._building is not None
        assert self._stream is not None
        try:
            value = loads("".join(self._text))
        except NotJSON:
            self._state = "over"
            return ""
        is_in = self._building.add_json(self._key, value, False)
        self._stream.close_value(self._key, "", is_in)
        self._state = "over" if self._building.failed else "key"
        return rest

