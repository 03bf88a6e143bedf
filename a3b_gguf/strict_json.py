"""JSON as RFC 8259 has it. Python's own reader also takes NaN, Infinity, 1e999 and repeated keys, silently."""

from __future__ import annotations

import json
import math
import re
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")


class NotJSON(ValueError):
    """Text that is no strict JSON. The message says what is wrong; at: the character where, or -1."""

    def __init__(self, message: str, at: int = -1) -> None:
        super().__init__(message)
        self.at = at


def loads(text: str) -> Any:
    """The value of `text`. Raises NotJSON for everything that another reader might refuse or read otherwise."""
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_finite, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise NotJSON(error.msg, error.pos) from error
    except RecursionError as error:
        raise NotJSON("nested too deeply") from error
    except NotJSON:
        raise
    except ValueError as error:  # Python refuses integers of more than 4,300 digits
        raise NotJSON(str(error)) from error


def dumps(value: Any) -> str:
    """`value` as compact JSON that is always valid UTF-8: text stays readable, unpaired surrogates become escapes.

    Each character is written for itself, so a string in pieces is the pieces of the string.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _constant(name: str) -> Any:
    raise NotJSON(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise NotJSON(f"{digits} is beyond the range of a number")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise NotJSON(f"key {key!r} occurs twice")
            seen.add(key)
    return value
