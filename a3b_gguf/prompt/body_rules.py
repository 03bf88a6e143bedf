"""Rules over the bytes of a request: that they are UTF-8 and strict JSON, which every reader reads alike."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import path_text, step, walk

BOM = b"\xef\xbb\xbf"
MAX_BYTES = 8 << 20
MAX_DEPTH = 64
MAX_MESSAGES = 4096
WHOLE = "the request"


@dataclass(frozen=True, slots=True)
class Body:
    """What was read. value: None when `undecodable`, `syntax` or `too_deep` says why it could not be.

    undecodable: byte that is no UTF-8. syntax: what the reader said, and at which character, if it knew.
    repeated: JSON path of every key that occurs twice in its object. not_finite: of every NaN and infinity.
    depth: levels of objects and lists.
    """

    data: bytes
    text: str = ""
    value: Any = None
    undecodable: int | None = None
    syntax: tuple[str, int | None] | None = None
    too_deep: bool = False
    repeated: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    depth: int = 0


def read_body(data: bytes) -> Body:
    """`data` as JSON, with everything that a strict reader would object to. Never raises."""
    if len(data) > MAX_BYTES:
        return Body(data)
    try:
        text = data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        return Body(data, undecodable=error.start + (len(BOM) if data.startswith(BOM) else 0))
    twice: dict[int, tuple[dict[str, Any], list[str]]] = {}  # by identity; the object is kept so that its id stays its own

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice[id(found)] = (found, [key for key, count in Counter(key for key, _ in items).items() if count > 1])
        return found

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        return Body(data, text, syntax=(error.msg, error.pos))
    except RecursionError:
        return Body(data, text, too_deep=True)
    except ValueError as error:  # Python refuses integers of more than 4,300 digits
        return Body(data, text, syntax=(str(error), None))
    return _inspect(Body(data, text, value), twice)


def _inspect(body: Body, twice: Mapping[int, tuple[dict[str, Any], list[str]]]) -> Body:
    repeated: list[str] = []
    not_finite: list[str] = []
    depth = 0
    for path, found, level in walk(body.value, "$"):
        depth = max(depth, level)
        if isinstance(found, float) and not math.isfinite(found):
            not_finite.append(path_text(path))
        elif isinstance(found, dict) and id(found) in twice:
            repeated += [path_text((path, step(key))) for key in twice[id(found)][1]]
    return replace(body, repeated=tuple(repeated), not_finite=tuple(not_finite), depth=depth)


def place(body: Body, at: int) -> tuple[str, int]:
    """Line, column and byte of a character of the text: what a person looks for, what an editor needs."""
    before = body.text[:at]
    offset = len(before.encode()) + (len(BOM) if body.data.startswith(BOM) else 0)
    return f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}", offset


def is_utf8(body: Body) -> Iterator[Hit]:
    if body.undecodable is not None:
        at = body.undecodable
        line = body.data[:at].count(b"\n") + 1
        yield Hit(f"byte {at}, line {line}", f"byte 0x{body.data[at]:02X} is not UTF-8", offset=at)


def has_no_bom(body: Body) -> Iterator[Hit]:
    if body.data.startswith(BOM):
        yield Hit("byte 0, line 1", "a byte order mark stands before the JSON", offset=0)


def is_strict(body: Body) -> Iterator[Hit]:
    if body.syntax is not None:
        message, at = body.syntax
        if at is None:
            yield Hit(WHOLE, f"not strict JSON: {message}")
        else:
            where, offset = place(body, at)
            yield Hit(where, f"not JSON: {message}", offset=offset)
    for path in body.not_finite:
        yield Hit(path, "NaN, Infinity or a number beyond the range of a double: no JSON number")


def has_no_repeated_key(body: Body) -> Iterator[Hit]:
    for path in body.repeated:
        yield Hit(path, "this key occurs twice in its object; readers differ in which value they take")


def is_within_limits(body: Body) -> Iterator[Hit]:
    if len(body.data) > MAX_BYTES:
        yield Hit(WHOLE, f"{len(body.data):,} bytes, at most {MAX_BYTES:,} are read")
    if body.too_deep or body.depth > MAX_DEPTH:
        depth = "too deeply" if body.too_deep else f"{body.depth} levels deep"
        yield Hit(WHOLE, f"nested {depth}, at most {MAX_DEPTH} levels are read")
    messages = body.value.get("messages") if isinstance(body.value, Mapping) else body.value
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        yield Hit("messages", f"{len(messages):,} messages, at most {MAX_MESSAGES:,} are read")


BODY_RULES: tuple[Rule[Body], ...] = (
    Rule("M001", "error", "The request is valid UTF-8.", "encode it again as UTF-8", is_utf8),
    Rule("M002", "warning", "No byte order mark before the JSON.", "strip the bytes EF BB BF", has_no_bom),
    Rule(
        "M003",
        "error",
        "The request is strict JSON: no NaN, Infinity, comments or trailing commas.",
        "mend the program that wrote it",
        is_strict,
    ),
    Rule("M004", "error", "No key occurs twice in an object.", "remove one of the two", has_no_repeated_key),
    Rule(
        "M005",
        "error",
        f"At most {MAX_BYTES >> 20} MiB, {MAX_DEPTH} levels, {MAX_MESSAGES:,} messages.",
        "split or shorten the request",
        is_within_limits,
    ),
)
