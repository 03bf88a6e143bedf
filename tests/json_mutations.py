"""JSON documents that are almost right: some values of a good one replaced, removed, renamed or moved, or some of its bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 7, 64, 255, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 10**400, -(10**30), 0.5, -0.0, 1e300, 1e-300])
ODD = st.sampled_from([float("nan"), float("inf"), "", "\0", "\ud800", "\u2581", "a" * 300, "model.norm.weight", "F8_E4M3", "BF16", "F32"])
SCALARS = st.none() | st.booleans() | NUMBERS | ODD | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)
Node = tuple[Any, Any]  # a container, and a key or index in it


@dataclass(frozen=True, slots=True)
class Change:
    """Done at place number `at` of the document, counted modulo its places; `other` is a second place."""

    kind: str
    at: int
    other: int
    value: Any


PLACES = st.integers(0, 1 << 20)
CHANGES = st.builds(Change, st.sampled_from(["replace", "replace", "remove", "rename", "copy", "swap", "nudge"]), PLACES, PLACES, VALUES)


def changed(document: Any, changes: list[Change], focus: Callable[[Any], Any] = lambda document: document) -> Any:
    """A copy of the document with the changes made in the part that `focus` picks."""
    document = copy.deepcopy(document)
    for change in changes:
        nodes = list(places(focus(document)))
        if nodes:
            apply(change, nodes)
    return document


def places(value: Any) -> Iterator[Node]:
    """Every key and index; of long lists and objects the first few, so that rare keys are hit too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, inner) in enumerate(list(items)):
        if number < 40:
            yield value, key
            yield from places(inner)


def apply(change: Change, nodes: list[Node]) -> None:
    container, key = nodes[change.at % len(nodes)]
    there, other = nodes[change.other % len(nodes)]
    if change.kind == "remove":
        del container[key]
    elif change.kind == "rename" and isinstance(container, dict):
        container[str(change.value)[:40]] = container.pop(key)
    elif change.kind == "nudge" and isinstance(container[key], int | float):
        container[key] += 1 if change.other % 2 else -1
    elif change.kind == "copy":
        container[key] = copy.deepcopy(there[other])
    elif change.kind == "swap":
        one, two = copy.deepcopy(container[key]), copy.deepcopy(there[other])
        container[key], there[other] = two, one
    else:
        container[key] = copy.deepcopy(change.value)


def text_of(document: Any) -> bytes:
    """As JSON; half characters stay escaped, NaN and Infinity are written as Python reads them."""
    return json.dumps(document).encode()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes `at` to `at` + `length`, modulo the file's size, become `data`."""

    at: int
    length: int
    data: bytes

    def apply(self, text: bytes) -> bytes:
        at = self.at % (len(text) + 1)
        return text[:at] + self.data + text[at + self.length :]


JUNK = st.sampled_from([b"", b"\0", b"\xff", b'"', b"{", b"]", b"[" * 5000, b"9" * 5000, b"NaN", b"-", b"\\ud800", b"1e999"])
BYTE_CHANGES = st.builds(Bytes, PLACES, st.sampled_from([0, 1, 2, 100, 1 << 30]), JUNK | st.binary(max_size=8))
