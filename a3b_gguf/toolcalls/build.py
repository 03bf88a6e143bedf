"""A call as written becomes a call of a declared tool with arguments that fit, or remarks on why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.strict_json import NotJSON, dumps, loads
from a3b_gguf.toolcalls.events import Diagnostic
from a3b_gguf.toolcalls.tools import Tool, Tools
from a3b_gguf.toolcalls.values import Schema, Unfit, allowed_types, value_of_json, value_of_text


@dataclass(frozen=True, slots=True)
class Built:
    """name and arguments of a call; both empty when there is none. remarks: what was mended, or why there is none."""

    name: str = ""
    arguments: str = ""
    remarks: tuple[Diagnostic, ...] = ()

    @property
    def is_call(self) -> bool:
        return bool(self.name)


def call_of_texts(tools: Tools, name: str, parameters: Sequence[tuple[str, str]]) -> Built:
    """A call whose arguments were written as text between tags, in that order."""
    tool, remarks = _tool(tools, name)
    if tool is None:
        return Built(remarks=tuple(remarks))
    arguments: dict[str, Any] = {}
    for key, text in parameters:
        if key in arguments:
            remarks.append(Diagnostic("O018", f"{tool.name}: parameter {key!r} is given twice, the first value stands"))
            continue
        types = allowed_types(tool.properties.get(key), tool.schema)
        if not text.strip() and types and "string" not in types:
            continue  # nothing stands where a number should: as if it were not given
        if not _add(arguments, tool, key, text, value_of_text, remarks):
            return Built(remarks=tuple(remarks))
    return _whole(tool, arguments, remarks)


def call_of_json(tools: Tools, text: str) -> Built:
    """A call written as {"name": ..., "arguments": {...}}."""
    try:
        written = loads(text)
    except NotJSON as error:
        return Built(remarks=(Diagnostic("O012", f"the call is not JSON: {error}"),))
    name = written.get("name") if isinstance(written, dict) else None
    if not isinstance(name, str):
        return Built(remarks=(Diagnostic("O014", "the call is no object with a name"),))
    tool, remarks = _tool(tools, name)
    if tool is None:
        return Built(remarks=tuple(remarks))
    found = written.get("arguments", written.get("parameters", {}))
    if isinstance(found, str):
        try:
            found = loads(found)
        except NotJSON as error:
            return Built(remarks=(*remarks, Diagnostic("O012", f"{tool.name}: the arguments are not JSON: {error}")))
    if not isinstance(found, dict):
        return Built(remarks=(*remarks, Diagnostic("O014", f"{tool.name}: the arguments are no object")))
    arguments: dict[str, Any] = {}
    for key, value in found.items():
        if not _add(arguments, tool, key, value, value_of_json, remarks):
            return Built(remarks=tuple(remarks))
    return _whole(tool, arguments, remarks)


def _tool(tools: Tools, name: str) -> tuple[Tool | None, list[Diagnostic]]:
    tool = tools.meant(name)
    if tool is None:
        known = ", ".join(tools.by_name) or "none"
        return None, [Diagnostic("O011", f"there is no tool {name!r}; declared: {known}")]
    return tool, [Diagnostic("O010", f"{name!r} is taken for {tool.name!r}")] if tool.name != name else []


def _add(
    arguments: dict[str, Any],
    tool: Tool,
    key: str,
    written: Any,
    read: Callable[[Any, Any, Schema], Any],
    remarks: list[Diagnostic],
) -> bool:
    """Puts the argument in. False when its value does not fit, which ends the call."""
    if key not in tool.properties and not tool.open:
        remarks.append(Diagnostic("O016", f"{tool.name}: there is no parameter {key!r}, it is left out"))
        return True
    try:
        arguments[key] = read(written, tool.properties.get(key), tool.schema)
    except Unfit as error:
        remarks.append(Diagnostic("O015", f"{tool.name}: parameter {key!r}: {error}"))
        return False
    return True


def _whole(tool: Tool, arguments: Mapping[str, Any], remarks: list[Diagnostic]) -> Built:
    missing = [name for name in tool.required if name not in arguments]
    if missing:
        return Built(remarks=(*remarks, Diagnostic("O017", f"{tool.name}: required parameter {missing[0]!r} is missing")))
    return Built(tool.name, dumps(arguments), tuple(remarks))
