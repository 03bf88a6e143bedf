"""The values of a GGUF file's metadata, with the type that the format gives each.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# name -> (number in the file, struct code, bytes); "str" and "arr" have no fixed size.
KINDS: dict[str, tuple[int, str, int]] = {
    "u8": (0, "B", 1), "i8": (1, "b", 1), "u16": (2, "H", 2), "i16": (3, "h", 2), "u32": (4, "I", 4), "i32": (5, "i", 4),
    "f32": (6, "f", 4), "bool": (7, "?", 1), "str": (8, "", 0), "arr": (9, "", 0), "u64": (10, "Q", 8), "i64": (11, "q", 8),
    "f64": (12, "d", 8),
}  # fmt: skip
KIND_OF_NUMBER = {number: kind for kind, (number, _, _) in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """One metadata value. kind: a key of KINDS; item: the kind of an array's elements, else ""."""

    kind: str
    value: Any
    item: str = ""


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """Stands for an array that the reader was not asked for: how many elements, and the byte offset of the first."""

    count: int
    offset: int


Metadata = dict[str, Field]


def u32(value: int) -> Field:
    return Field("u32", value)


def i32(value: int) -> Field:
    return Field("i32", value)


def f32(value: float) -> Field:
    return Field("f32", float(value))


def boolean(value: bool) -> Field:
    return Field("bool", bool(value))


def string(value: str) -> Field:
    return Field("str", value)


def array(item: str, values: Sequence[Any]) -> Field:
    """An array whose elements all have kind `item`."""
    return Field("arr", list(values), item)
