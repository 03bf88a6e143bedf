"""The text of an argument as the value that its JSON Schema asks for.

Only the part of JSON Schema that decides a type is read: type, anyOf, oneOf, allOf, enum, const, nullable, and $ref within the
tool's own schema. Whatever could be a string stays a string when the schema says string: a zip code keeps its zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from a3b_gguf.strict_json import NotJSON, loads

Schema = Mapping[str, Any]
TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")  # the order in which they are tried
PYTHON_LITERALS = {"True": True, "False": False, "None": None}


class Unfit(ValueError):
    """A value that its schema does not allow. The message says what was expected."""


def allowed_types(schema: Any, root: Schema) -> tuple[str, ...]:
    """The JSON types that `schema` allows, in the order of TYPES; none when it does not say."""
    found = _types(schema, root, set())
    return tuple(name for name in TYPES if name in found)


def _types(schema: Any, root: Schema, seen: set[int]) -> set[str]:
    if not isinstance(schema, Mapping) or id(schema) in seen:  # a schema may refer to itself
        return set()
    seen.add(id(schema))
    declared = schema.get("type")
    found = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str) and name in TYPES}
    if not found:
        for inner in _alternatives(schema, root):
            found |= _types(inner, root, seen)
    if not found:
        found = {_type_of(value) for value in _constants(schema)}
    if found and schema.get("nullable") is True:
        found.add("null")
    return found


def value_of_text(text: str, schema: Any, root: Schema) -> Any:
    """The value of an argument that was written as text. Raises Unfit when the schema's types do not allow it.

    Other types are tried before string, as llama.cpp does; without a type only an object or a list is taken for one.
    """
    types = allowed_types(schema, root)
    if not types:
        value = _parsed(text)
        return value if isinstance(value, (dict, list)) else text
    if types != ("string",):
        value = _parsed(text)
        for name in types:
            if name != "string" and _is(value, name):
                return int(value) if name == "integer" else value
    if "string" in types:
        return _enumerated(text, schema, root)
    raise Unfit(f"expected {' or '.join(types)}, found {text.strip()[:60]!r}")


def value_of_json(value: Any, schema: Any, root: Schema) -> Any:
    """The value of an argument that was written as JSON; a string is read as text where a string is not allowed."""
    types = allowed_types(schema, root)
    for name in types:
        if _is(value, name):
            return int(value) if name == "integer" else value
    if not types:
        return value
    if isinstance(value, str):
        return value_of_text(value, schema, root)
    raise Unfit(f"expected {' or '.join(types)}, found {_type_of(value)}")


class _Nothing:
    """No value: the text is no JSON. None would be null."""


def _parsed(text: str) -> Any:
    text = text.strip()
    if text in PYTHON_LITERALS:
        return PYTHON_LITERALS[text]
    try:
        return loads(text)
    except NotJSON:
        return _Nothing


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    types = {"null": type(None), "boolean": bool, "object": dict, "array": list, "string": str}
    return isinstance(value, types[name])


def _type_of(value: Any) -> str:
    return next((name for name in TYPES if _is(value, name)), "string")


def _enumerated(text: str, schema: Any, root: Schema) -> str:
    """`text`, or the member of an enum that is meant by it: models write quotes around those, and newlines."""
    members = [value for inner in _family(schema, root, set()) for value in _constants(inner) if isinstance(value, str)]
    if not members or text in members:
        return text
    bare = text.strip()
    unquoted = bare[1:-1] if len(bare) > 1 and bare[0] == bare[-1] == '"' else bare
    return next((found for found in (bare, unquoted) if found in members), text)


def _constants(schema: Schema) -> Sequence[Any]:
    found = schema.get("enum")
    return found if isinstance(found, list) else [schema["const"]] if "const" in schema else []


def _alternatives(schema: Schema, root: Schema) -> list[Any]:
    found: list[Any] = []
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        found += inner if isinstance(inner, list) else []
    target = _resolved(schema.get("$ref"), root)
    return found if target is None else [*found, target]


def _family(schema: Any, root: Schema, seen: set[int]) -> list[Schema]:
    """The schema and all its alternatives."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return []
    seen.add(id(schema))
    return [schema, *(found for inner in _alternatives(schema, root) for found in _family(inner, root, seen))]


def _resolved(reference: Any, root: Schema) -> Any:
    """What a `#/...` points at; None when it is something else or points at nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
