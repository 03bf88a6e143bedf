"""The text of an argument as the value that its JSON Schema asks for.

Only the part of JSON Schema that decides a type is read: type, anyOf, oneOf, allOf, enum, const, nullable, and $ref within the
tool's own schema. Whatever could be a string stays a string when the schema says string: a zip code keeps its zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.strict_json import NotJSON, loads
from a3b_gguf.toolcalls.repair import repaired

Schema = Mapping[str, Any]
TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")  # the order in which they are tried
PYTHON_LITERALS = {"True": True, "False": False, "None": None}


class Unfit(ValueError):
    """A value that its schema does not allow. The message says what was expected."""


def allowed_types(schema: Any, root: Schema) -> tuple[str, ...]:
    """The JSON types that `schema` allows, in the order of TYPES; none when it does not say."""
    found = _types(schema, root, {}) or frozenset()
    return tuple(name for name in TYPES if name in found)


def _types(schema: Any, root: Schema, known: dict[int, frozenset[str] | None]) -> frozenset[str] | None:
    """The types; empty when the schema does not say. None for one that is being looked at already: a schema may refer to itself."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = None
        known[id(schema)] = _own_types(schema, root, known)
    return known[id(schema)]


def _own_types(schema: Schema, root: Schema, known: dict[int, frozenset[str] | None]) -> frozenset[str]:
    declared = schema.get("type")
    found = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str) and name in TYPES}
    for key in () if found else ("anyOf", "oneOf", "allOf", "$ref"):
        each = [types for inner in _inner(schema, key, root) if (types := _types(inner, root, known)) is not None]
        if key in ("anyOf", "oneOf") and not all(each):
            return frozenset()  # an alternative that takes anything
        found |= {name for types in each for name in types}
    if not found:
        found = {_type_of(value) for value in _constants(schema)}
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an argument. repairs: names of what was mended to read it."""

    value: Any
    repairs: tuple[str, ...] = ()


def value_of_text(text: str, schema: Any, root: Schema, may_repair: bool = True) -> Value:
    """The value of an argument that was written as text. Raises Unfit when the schema's types do not allow it.

    Other types are tried before string, as llama.cpp does; without a type only an object or a list is taken for one.
    """
    types = allowed_types(schema, root)
    if not types:
        value = _parsed(text)
        return Value(value if isinstance(value, (dict, list)) else text)
    if types == ("string",):
        return Value(_member(text, _NOTHING, schema, root, text))
    value = _parsed(text)
    repairs: tuple[str, ...] = ()
    if value is _NOTHING and may_repair and "string" not in types and {"object", "array"} & set(types):
        found = repaired(text)
        value, repairs = (found.value, found.names) if found else (value, repairs)
    member = _member(text, value, schema, root, _NOTHING)
    if member is not _NOTHING:
        return Value(member, repairs)
    for name in types:
        if name != "string" and _is(value, name):
            return Value(int(value) if name == "integer" else value, repairs)
    if "string" in types:
        return Value(text)
    raise Unfit(f"expected {' or '.join(types)}, found {text.strip()[:60]!r}")


def value_of_json(value: Any, schema: Any, root: Schema, may_repair: bool = True) -> Value:
    """The value of an argument that was written as JSON; a string is read as text where a string is not allowed."""
    types = allowed_types(schema, root)
    for name in types:
        if _is(value, name):
            return Value(int(value) if name == "integer" else value)
    if not types:
        return Value(value)
    if isinstance(value, str):
        return value_of_text(value, schema, root, may_repair)
    raise Unfit(f"expected {' or '.join(types)}, found {_type_of(value)}")


_NOTHING = object()  # no value: the text is no JSON; None would be null


def _parsed(text: str) -> Any:
    text = text.strip()
    if text in PYTHON_LITERALS:
        return PYTHON_LITERALS[text]
    try:
        return loads(text)
    except NotJSON:
        return _NOTHING


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    types = {"null": type(None), "boolean": bool, "object": dict, "array": list, "string": str}
    return isinstance(value, types[name])


def _type_of(value: Any) -> str:
    return next((name for name in TYPES if _is(value, name)), "string")


def _member(text: str, value: Any, schema: Any, root: Schema, otherwise: Any) -> Any:
    """The member of an enum that is meant by `text`, read as `value`: models write quotes around those, and newlines."""
    members = [member for inner in _family(schema, root, set()) for member in _constants(inner)]
    if not members:
        return otherwise
    bare = text.strip()
    unquoted = bare[1:-1] if len(bare) > 1 and bare[0] == bare[-1] == '"' else bare
    candidates = (value, text, bare, unquoted)
    return next((found for found in candidates if any(_same(found, member) for member in members)), otherwise)


def _same(one: Any, other: Any) -> bool:
    return _type_of(one) == _type_of(other) and bool(one == other)


def _constants(schema: Schema) -> Sequence[Any]:
    found = schema.get("enum")
    return found if isinstance(found, list) else [schema["const"]] if "const" in schema else []


def _inner(schema: Schema, key: str, root: Schema) -> list[Any]:
    """The schemas under a keyword that combines some, or the one that a $ref points at."""
    if key == "$ref":
        target = _resolved(schema.get("$ref"), root)
        return [] if target is None else [target]
    inner = schema.get(key)
    return inner if isinstance(inner, list) else []


def _family(schema: Any, root: Schema, seen: set[int]) -> list[Schema]:
    """The schema and all its alternatives."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return []
    seen.add(id(schema))
    inner = [each for key in ("anyOf", "oneOf", "allOf", "$ref") for each in _inner(schema, key, root)]
    return [schema, *(found for each in inner for found in _family(each, root, seen))]


def _resolved(reference: Any, root: Schema) -> Any:
    """What a `#/...` points at; None when it is something else or points at nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
