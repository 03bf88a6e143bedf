"""JSON Schema as tools use it: whether a schema makes sense, and whether arguments keep it. What templates and grammars read, no more.

A full validator belongs to whoever runs the call; here a wrong verdict must be impossible, so what is not understood is let pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
MAX_REPETITIONS = 2000  # MAX_REPETITION_THRESHOLD of llama.cpp, src/llama-grammar.cpp
MAX_UNIONS = 4  # levels of anyOf inside anyOf
UNIONS = ("anyOf", "oneOf", "allOf")
Problem = tuple[str, str]  # path below the schema or value, what is wrong


def schema_problems(schema: Any, path: str = "", root: bool = True) -> Iterator[Problem]:
    """What makes `schema` no JSON Schema of a function's parameters."""
    if isinstance(schema, bool) and not root:
        return
    if not isinstance(schema, Mapping):
        yield path, "a schema is an object"
        return
    yield from _type_problems(schema, path, root)
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield f"{path}.properties", "`properties` is an object of schemas"
        properties = {}
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"{path}.required", "`required` is a list of names"
    elif missing := [name for name in required if properties and name not in properties]:
        yield f"{path}.required", f"required {missing[0]!r} is not among the properties"
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        yield f"{path}.enum", "`enum` is a list with at least one value"
    for where, inner in _inner(schema, properties, path):
        yield from schema_problems(inner, where, root=False)


def _type_problems(schema: Mapping[str, Any], path: str, root: bool) -> Iterator[Problem]:
    found = schema.get("type")
    names = found if isinstance(found, list) else [found]
    unknown = [name for name in names if name is not None and (not isinstance(name, str) or name not in TYPES)]
    if unknown:
        yield f"{path}.type", f"there is no type {unknown[0]!r} in JSON Schema"
    elif root and found not in (None, "object", ["object"]):
        yield f"{path}.type", f"the parameters of a function are an object, not {found!r}"


def _inner(schema: Mapping[str, Any], properties: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, inner in properties.items():
        yield f"{path}.properties.{name}", inner
    if "items" in schema and not isinstance(schema["items"], list):
        yield f"{path}.items", schema["items"]
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield f"{path}.additionalProperties", schema["additionalProperties"]
    for key in UNIONS:
        found = schema.get(key)
        for index, inner in enumerate(found if isinstance(found, list) else []):
            yield f"{path}.{key}[{index}]", inner


def grammar_problems(schema: Any, path: str = "", root: Any = None, unions: int = 0) -> Iterator[Problem]:
    """What llama.cpp cannot turn into a grammar."""
    if not isinstance(schema, Mapping):
        return
    top = schema if root is None else root
    for key in ("minItems", "maxItems", "minLength", "maxLength"):
        found = schema.get(key)
        if isinstance(found, int) and not isinstance(found, bool) and found > MAX_REPETITIONS:
            yield f"{path}.{key}", f"{key} {found:,} is more than the {MAX_REPETITIONS:,} repetitions that a grammar may have"
    reference = schema.get("$ref")
    if isinstance(reference, str) and resolve(reference, top) is None:
        yield f"{path}.$ref", f"$ref {reference!r} leads nowhere in this schema"
    unions += any(key in schema for key in UNIONS)
    if unions > MAX_UNIONS:
        yield path, f"more than {MAX_UNIONS} levels of anyOf, oneOf or allOf"
        return
    properties = schema.get("properties")
    for where, inner in _inner(schema, properties if isinstance(properties, Mapping) else {}, path):
        yield from grammar_problems(inner, where, top, unions)


def resolve(reference: str, root: Any) -> Any:
    """What a local `#/...` reference points at; None when there is nothing, or when it is not local."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def violations(value: Any, schema: Any, path: str = "") -> Iterator[Problem]:
    """Where `value` breaks `schema`: types, enum, const, required and forbidden properties, items. Unions and references are not judged."""
    if not isinstance(schema, Mapping) or any(key in schema for key in (*UNIONS, "$ref", "not", "if")):
        return
    found = schema.get("type")
    names = [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str) and name in TYPES]
    if names and not any(is_of_type(value, name) for name in names):
        yield path, f"{_shown(value)} is not of type {' or '.join(names)}"
        return
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        yield path, f"{_shown(value)} is none of {_shown(schema['enum'])}"
    if isinstance(value, Mapping):
        yield from _object_violations(value, schema, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from violations(item, schema.get("items"), f"{path}[{index}]")


def _object_violations(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[Problem]:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else []:
        if isinstance(name, str) and name not in value:
            yield path, f"required {name!r} is missing"
    for name, item in value.items():
        if name in properties:
            yield from violations(item, properties[name], f"{path}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{path}.{name}", f"there is no parameter {name!r}"


def is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
