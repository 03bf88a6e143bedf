"""The tools that a request declares, found by the names that models write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from a3b_gguf.schema_check import SchemaCheck
from a3b_gguf.toolcalls.values import Schema

WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
SEPARATORS = re.compile(r"[-_. ]+")


# Keywords beside which a string, or an object of parameters, can be judged before it is whole.
FREE_STRING = frozenset(("type", "title", "description", "default", "examples", "example", "$comment"))
PLAIN_PARAMETERS = FREE_STRING | {"properties", "required", "additionalProperties", "$schema", "$defs", "definitions", "strict"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One declared function. properties: schema of each parameter; open: whether others are allowed; schema: of all arguments.

    check: judges whole arguments.
    """

    name: str
    schema: Schema
    check: SchemaCheck = field(compare=False)

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.schema.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> tuple[str, ...]:
        found = self.schema.get("required")
        return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()

    @property
    def open(self) -> bool:
        return self.schema.get("additionalProperties") is not False

    def takes_any_text(self, key: str) -> bool:
        """Whether every text whatever is a fitting value of the parameter."""
        schema = self.properties.get(key)
        return isinstance(schema, Mapping) and schema.get("type") == "string" and schema.keys() <= FREE_STRING

    def is_plain(self) -> bool:
        """Whether nothing but its own schema and being there decides about a parameter."""
        return self.schema.keys() <= PLAIN_PARAMETERS


@dataclass(frozen=True, slots=True)
class Tools:
    """by_key: name as a matching key -> the tools that share it."""

    by_name: Mapping[str, Tool]
    by_key: Mapping[str, tuple[Tool, ...]]

    def exactly(self, name: str) -> Tool | None:
        return self.by_name.get(name)

    def meant(self, name: str) -> Tool | None:
        """The tool called `name`, else the only one whose name differs in case and separators alone."""
        if name in self.by_name:
            return self.by_name[name]
        same = self.by_key.get(matching_key(name), ())
        return same[0] if len(same) == 1 else None


def declared_tools(tools: Sequence[Any]) -> Tools:
    """The functions of an OpenAI `tools` list; what has another form is left out (rule M070 reports it)."""
    by_name: dict[str, Tool] = {}
    by_key: dict[str, tuple[Tool, ...]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and isinstance(function, Mapping) and name not in by_name:
            schema = function.get("parameters")
            schema = schema if isinstance(schema, Mapping) else {}
            by_name[name] = Tool(name, schema, SchemaCheck(schema))
            key = matching_key(name)
            by_key[key] = (*by_key.get(key, ()), by_name[name])
    return Tools(by_name, by_key)


def matching_key(name: str) -> str:
    """Lower snake_case of a name: `getWeather`, `Get_Weather` and `GET-WEATHER` are all get_weather."""
    return SEPARATORS.sub("_", WORD_BORDER.sub("_", name)).lower().strip("_")
