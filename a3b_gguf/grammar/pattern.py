"""A regular expression of a JSON Schema as rules. What GBNF cannot say (look-around, back references, borders of words) is refused.

Grammar of the expressions: ECMA-262, section 22.2.1, the part without flags.
"""

from __future__ import annotations

from collections.abc import Callable

from a3b_gguf.grammar.gbnf import MOST_REPETITIONS, NotExpressible, Ranges, common, complement, either, one_of, repeat

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
ASCII: Ranges = ((0x00, 0x7F),)
# What is no digit in ASCII may be one in Unicode, which a validator may know: the complements stay within ASCII.
CLASSES = {
    "d": DIGITS, "D": common(complement(DIGITS), ASCII), "w": WORD, "W": common(complement(WORD), ASCII), "s": SPACE,
    "S": common(complement(SPACE), ASCII),
}  # fmt: skip
CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D))


def pattern_rule(pattern: str, allowed: Ranges, spelled: Callable[[int], str]) -> str:
    """What `pattern` matches somewhere in a text of `allowed` characters, as one symbol.

    spelled: a character that the pattern demands, as a symbol: a JSON string writes some of them as escapes. Raises NotExpressible.
    """
    return _Reader(pattern, allowed, spelled).whole()


class _Reader:
    """Owns the place in the expression."""

    def __init__(self, pattern: str, allowed: Ranges, spelled: Callable[[int], str]) -> None:
        self._text, self._at = pattern, 0
        self._allowed, self._spelled = allowed, spelled
        self._depth = 0

    def whole(self) -> str:
        alternatives = [self._anchored()]
        while self._take("|"):
            alternatives.append(self._anchored())
        if self._at < len(self._text):
            raise self._refused("a bracket too many")
        return either(alternatives)

    def _anchored(self) -> str:
        """An alternative at the top, where anchors mean something: without one there may be more text on that side."""
        anything = f"{one_of(self._allowed)}*"
        before = [] if self._take("^") else [anything]
        body = self._sequence()
        after = [] if self._take("$") else [anything]
        if self._peek() not in ("", "|", ")"):
            raise self._refused("an anchor inside")
        return f"({' '.join([*before, *body, *after])})" if [*before, *body, *after] else '""'

    def _sequence(self) -> list[str]:
        found = []
        while self._peek() not in ("", "|", ")", "$"):
            found.append(self._quantified(self._atom()))
        return found

    def _group(self) -> str:
        self._depth += 1
        if self._take("?") and not self._take(":"):
            raise self._refused("a group of a special kind")
        if self._depth > 50:
            raise self._refused("groups nested too deeply")
        alternatives = []
        while True:
            alternatives.append(" ".join(self._sequence()) or '""')
            if not self._take("|"):
                break
        if not self._take(")"):
            raise self._refused("a group that is not closed")
        self._depth -= 1
        return f"({' | '.join(alternatives)})"

    def _atom(self) -> str:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return one_of(common(self._class(), self._allowed))
        if character == ".":
            return one_of(common(complement(LINE_END), self._allowed))
        if character == "\\":
            escaped = self._escape()
            return self._spelled(escaped) if isinstance(escaped, int) else one_of(common(escaped, self._allowed))
        if character in "*+?{}])^":
            raise self._refused(f"{character!r} where nothing can be repeated or closed")
        return self._spelled(ord(character))

    def _quantified(self, item: str) -> str:
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if bounds is not None:
            self._next()
        elif self._peek() == "{":
            bounds = self._braces()
        if bounds is None:
            return item
        self._take("?")  # a lazy one matches the same texts
        if self._peek() in ("*", "+", "?", "{"):
            raise self._refused("a repeated repetition")
        least, most = bounds
        if max(least, most or 0) > MOST_REPETITIONS:
            raise self._refused(f"more than {MOST_REPETITIONS} repetitions")
        return f"({repeat(item, least, most)})"

    def _braces(self) -> tuple[int, int | None]:
        inside, closed, _ = self._text[self._at + 1 :].partition("}")
        least, comma, most = inside.partition(",")
        if not closed or not least.isdecimal() or (most and not most.isdecimal()):
            raise self._refused("braces that are no repetition")
        self._at += len(inside) + 2
        return int(least), int(most) if most else None if comma else int(least)

    def _class(self) -> Ranges:
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        has_class = False
        while not self._take("]"):
            low = self._class_member()
            if not isinstance(low, int):
                found += low
                has_class = True
                continue
            high: int | Ranges = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._next()
                high = self._class_member()
            if not isinstance(high, int) or high < low:
                raise self._refused("a range that is none")
            found.append((low, high))
        ranges = tuple(sorted(found))
        if negated:
            return common(complement(ranges), ASCII) if has_class else complement(ranges)
        return ranges

    def _class_member(self) -> int | Ranges:
        character = self._next()
        if not character:
            raise self._refused("a class that is not closed")
        return self._escape() if character == "\\" else ord(character)

    def _escape(self) -> int | Ranges:
        character = self._next()
        if character in CLASSES:
            return CLASSES[character]
        if character in CONTROLS:
            return CONTROLS[character]
        if character in ("x", "u"):
            n_digits = 2 if character == "x" else 4
            digits = self._text[self._at : self._at + n_digits]
            self._at += n_digits
            if len(digits) == n_digits and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                return int(digits, 16)
            raise self._refused("a code that is none")
        if not character or character.isalnum():
            raise self._refused(f"\\{character}")
        return ord(character)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        found = self._peek()
        self._at += len(found)
        return found

    def _take(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self._at += 1
        return True

    def _refused(self, what: str) -> NotExpressible:
        return NotExpressible(f"pattern {self._text[:60]!r}: {what}")
