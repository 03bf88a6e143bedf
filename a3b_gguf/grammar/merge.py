"""Several schemas that all hold, as one: `allOf`, and what stands beside `$ref`, `anyOf` and `oneOf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from a3b_gguf.grammar.gbnf import NotExpressible
from a3b_gguf.grammar.keywords import ANNOTATIONS

MOST_NESTED = 32  # references and allOf within each other
Schema = dict[str, Any]
Resolve = Callable[[Any, str], Any]


def merged(schema: Mapping[str, Any], path: str, resolve: Resolve, depth: int = 0) -> Schema:
    """`schema` without its allOf and without $ref at its top. Raises NotExpressible for what cannot hold together, or cannot be said."""
    if depth > MOST_NESTED:
        raise NotExpressible(f"{path}: allOf and $ref go round in circles, or are nested too deeply")
    found: Schema = {key: value for key, value in schema.items() if key not in ("allOf", "$ref")}
    parts = [resolve(schema["$ref"], path)] if "$ref" in schema else []
    inner = schema.get("allOf", [])
    if not isinstance(inner, list):
        raise NotExpressible(f"{path}: allOf is no list of schemas")
    for part in [*parts, *inner]:
        if part is True:
            continue
        if not isinstance(part, Mapping):
            raise NotExpressible(f"{path}: no value fits")
        found = _both(found, merged(part, path, resolve, depth + 1), path)
    return found


def _both(one: Schema, other: Schema, path: str) -> Schema:
    found = dict(one)
    for key, value in other.items():
        if key not in found or key in ANNOTATIONS:
            found.setdefault(key, value)
        elif found[key] != value:
            found[key] = _combined(key, found[key], value, path)
    if "properties" in one or "properties" in other:
        found["properties"] = _properties(one, other)
    return found


def _properties(one: Schema, other: Schema) -> Schema:
    """Each property under the rules of both sides; what only one side declares is an additional one for the other."""
    ours, theirs = one.get("properties", {}), other.get("properties", {})
    found: Schema = {}
    for name in (*ours, *theirs):
        rules = [side.get("properties", {}).get(name, side.get("additionalProperties", True)) for side in (one, other)]
        rules = [rule for rule in rules if rule is not True]
        found[name] = rules[0] if len(rules) == 1 else {"allOf": rules} if rules else True
    return found


def _combined(key: str, one: Any, other: Any, path: str) -> Any:
    if key == "properties":
        return one
    if key == "type":
        return _types(one, other, path)
    if key in LISTS:
        return LISTS[key](one, other)
    if key in BOUNDS:
        return BOUNDS[key](one, other)
    if key in ("items", "additionalProperties"):
        return False if False in (one, other) else other if one is True else one if other is True else {"allOf": [one, other]}
    if key in ("anyOf", "oneOf"):
        return [{"allOf": [alternative, {key: other}]} for alternative in one]
    raise NotExpressible(f"{path}: two rules by {key}")


def _types(one: Any, other: Any, path: str) -> list[Any]:
    both = [set(kinds) if isinstance(kinds, list) else {kinds} for kinds in (one, other)]
    found = both[0] & both[1]
    if any("number" in kinds for kinds in both) and any("integer" in kinds for kinds in both):
        found.add("integer")
    if not found:
        raise NotExpressible(f"{path}: no value is of type {one} and of type {other}")
    return sorted(found, key=str)


LISTS: dict[str, Callable[[Any, Any], Any]] = {
    "required": lambda one, other: [*one, *(name for name in other if name not in one)],
    "enum": lambda one, other: [member for member in one if member in other],
}
BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max, "minProperties": max,
    "maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min, "maxProperties": min,
}  # fmt: skip
