"""The pieces of a GBNF grammar: literals, sets of characters, repetitions, and the table of its rules.

Written for the reader in llama.cpp, src/llama-grammar.cpp: names are letters, digits and `-`; no rule may begin with itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# llama.cpp refuses more repetitions than this (MAX_REPETITION_THRESHOLD).
MOST_REPETITIONS = 2000
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]+")
Ranges = tuple[tuple[int, int], ...]
# Everything that a text may hold: no control characters but tab and line breaks, no halves of surrogate pairs.
TEXT: Ranges = ((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0xD7FF), (0xE000, 0x10FFFF))
# What a JSON string may hold as it is: no controls, quotation mark or backslash.
JSON_TEXT: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))


class NotExpressible(Exception):
    """A schema that no grammar of ours can say. The message names the place and the reason."""


class Rules:
    """Owns the rules of one grammar."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._bodies

    def reserve(self, wanted: str) -> str:
        """A name that is free, close to the one wanted; its body follows by `set`."""
        base = NOT_IN_NAMES.sub("-", wanted).strip("-").lower() or "x"
        name, count = base, 1
        while name in self._bodies:
            count += 1
            name = f"{base}-{count}"
        self._bodies[name] = ""
        return name

    def set(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def add(self, wanted: str, body: str) -> str:
        """A new rule; the name that it got."""
        name = self.reserve(wanted)
        self._bodies[name] = body
        return name

    def once(self, name: str, body: str) -> str:
        """A rule that several places share. name: one that `reserve` would not change."""
        self._bodies.setdefault(name, body)
        return name

    def text(self) -> str:
        """The grammar; rules that were never given a body are left out, as nothing refers to them."""
        return "".join(f"{name} ::= {body}\n" for name, body in self._bodies.items() if body)


def literal(text: str) -> str:
    """`text` as it is."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def one_of(ranges: Ranges) -> str:
    """One character of the ranges. Raises NotExpressible when there is none."""
    if not ranges:
        raise NotExpressible("no character fits")
    return "[" + "".join(_in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}" for low, high in ranges) + "]"


def without(ranges: Ranges, characters: Iterable[str]) -> Ranges:
    """The ranges less some characters."""
    for code in sorted({ord(character) for character in characters}):
        ranges = tuple(part for low, high in ranges for part in _cut(low, high, code))
    return ranges


def common(one: Ranges, other: Ranges) -> Ranges:
    """What is in both."""
    both = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return tuple(sorted((low, high) for low, high in both if low <= high))


def complement(ranges: Ranges) -> Ranges:
    """Every code point that is not in the ranges."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return (*found, (at, 0x10FFFF)) if at <= 0x10FFFF else tuple(found)


def repeat(item: str, least: int, most: int | None) -> str:
    """`item`, one symbol, several times. Bounds beyond what llama.cpp can count must be dropped before."""
    if most is not None and least > most:
        raise NotExpressible(f"at least {least} and at most {most} of something")
    if most == 0:
        return '""'
    if (least, most) in SHORT:
        return item + SHORT[least, most]
    return f"{item}{{{least},{'' if most is None else most}}}"


SHORT: dict[tuple[int, int | None], str] = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}


def either(alternatives: Sequence[str]) -> str:
    """One of the alternatives, as one symbol."""
    distinct = list(dict.fromkeys(alternatives))
    return distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"


def _cut(low: int, high: int, code: int) -> list[tuple[int, int]]:
    if not low <= code <= high:
        return [(low, high)]
    return [part for part in ((low, code - 1), (code + 1, high)) if part[0] <= part[1]]


def _escaped(character: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    return named or (character if character.isprintable() else _in_class(ord(character)))


def _in_class(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
