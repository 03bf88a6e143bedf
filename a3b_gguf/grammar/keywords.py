"""JSON Schema's keywords as the grammars treat them. Source: https://json-schema.org/draft/2020-12/json-schema-validation"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from a3b_gguf.grammar.gbnf import NotExpressible

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords that restrict nothing.
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "$defs", "definitions", "deprecated",
    "readOnly", "writeOnly", "strict",
))  # fmt: skip
# Keywords that restrict values and that no rule says, with the types that they speak of.
NOT_SAID: Mapping[str, tuple[str, ...]] = {
    "not": TYPES, "if": TYPES, "dependentRequired": ("object",), "dependentSchemas": ("object",), "dependencies": ("object",),
    "patternProperties": ("object",), "propertyNames": ("object",), "minProperties": ("object",), "maxProperties": ("object",),
    "contains": ("array",), "uniqueItems": ("array",), "multipleOf": ("integer", "number"),
}  # fmt: skip
# Keywords that imply a type where none is declared: a value of that type satisfies the schema, so a grammar may ask for it.
IMPLIED = (
    ("object", ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")),
    ("array", ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains")),
    ("string", ("pattern", "format", "minLength", "maxLength")),
    ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
)


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that the schema declares, or implies; empty when it does neither. Raises NotExpressible for types that are none."""
    declared = schema.get("type")
    found = [kind for kind in (declared if isinstance(declared, list) else [declared]) if kind in TYPES]
    if declared is not None and not found:
        raise NotExpressible(f"type {str(declared)[:60]!r} is none")
    if found and schema.get("nullable") is True and "null" not in found:
        found.append("null")
    return tuple(found) or next(((kind,) for kind, keys in IMPLIED if any(key in schema for key in keys)), ())


def not_said(schema: Mapping[str, Any], types: tuple[str, ...]) -> list[str]:
    """The keywords that restrict values of those types and that no rule says."""
    return [
        keyword
        for keyword, speaks_of in NOT_SAID.items()
        if keyword in schema and schema[keyword] not in (False, None, 0) and (not types or set(types) & set(speaks_of))
    ]


def number_in(schema: Mapping[str, Any], key: str) -> float | None:
    found = schema.get(key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def count_in(schema: Mapping[str, Any], key: str) -> int | None:
    found = number_in(schema, key)
    return None if found is None else int(found)
