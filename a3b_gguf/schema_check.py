"""Whether a JSON value fits its JSON Schema, by the jsonschema package. Nothing is ever fetched: a `$ref` points into its own schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MOST_SHOWN = 160  # characters of a message; jsonschema quotes whole values
MOST_KEPT = 256  # validators; to check that a schema is one takes longer than to check a value with it


class SchemaCheck:
    """Judges values by one schema.

    A schema that is none itself, or that points outside of itself, is not judged by: then every value passes, and `unusable` says why.
    """

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        self._schema = schema
        self._compiled: _Compiled | None = None
        self.unusable = ""

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, with its place; None when it fits."""
        if self._compiled is None:
            self._compiled = _compiled_of(self._schema)
            self.unusable = self._compiled.unusable
        if self.unusable:
            return None
        from referencing.exceptions import Unresolvable

        try:
            error = next(iter(self._compiled.validator.iter_errors(value)), None)
        except RecursionError:
            self.unusable = "the schema refers to itself without end, or the value is nested too deeply"
            return None
        except Unresolvable as missing:
            self.unusable = f"the schema points at something that is not in it: {missing}"
            return None
        except re.error as bad:
            self.unusable = f"a pattern of the schema cannot be used here: {bad}"
            return None
        return None if error is None else _said(error.absolute_path, error.message)


@dataclass(frozen=True, slots=True)
class _Compiled:
    validator: Any
    unusable: str = ""


def _compiled_of(schema: Mapping[str, Any] | bool) -> _Compiled:
    try:
        return _compile(json.dumps(_plain(schema)))
    except (RecursionError, TypeError, ValueError) as error:
        return _Compiled(None, f"the schema is none: {type(error).__name__}")


@lru_cache(maxsize=MOST_KEPT)
def _compile(text: str) -> _Compiled:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(text)
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        return _Compiled(None, f"the schema is none: {_said(error.absolute_path, error.message)}")
    return _Compiled(kind(schema, registry=Registry()))  # an empty registry: jsonschema's own would ask the network


def _said(path: Any, message: str) -> str:
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    short = message if len(message) <= MOST_SHOWN else message[:MOST_SHOWN] + "..."
    return f"{where}: {short}" if where else short


def _plain(schema: Any) -> Any:
    """The schema with OpenAPI's `nullable`, which JSON Schema does not know, said in its words."""
    if isinstance(schema, list):
        return [_plain(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _plain(inner) for key, inner in schema.items()}
    if found.get("nullable") is True:
        del found["nullable"]
        return {"anyOf": [{"type": "null"}, found]}
    return found
