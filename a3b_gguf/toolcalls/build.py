"""A call as written becomes a call of a declared tool with arguments that fit, or remarks on why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from a3b_gguf.strict_json import NotJSON, dumps, loads
from a3b_gguf.toolcalls.events import Diagnostic
from a3b_gguf.toolcalls.repair import repaired
from a3b_gguf.toolcalls.tools import Tool, Tools
from a3b_gguf.toolcalls.values import Schema, Unfit, Value, allowed_types, value_of_json, value_of_text


@dataclass(frozen=True, slots=True)
class Built:
    """name and arguments of a call; both empty when there is none. remarks: what was mended, or why there is none."""

    name: str = ""
    arguments: str = ""
    remarks: tuple[Diagnostic, ...] = ()

    @property
    def is_call(self) -> bool:
        return bool(self.name)


class Building:
    """Owns the arguments of one call, as they become known. Once an argument does not fit there is no call, whatever follows."""

    def __init__(self, tools: Tools, name: str) -> None:
        self.tool: Tool | None = tools.meant(name)
        self.arguments: dict[str, Any] = {}
        self.failed = self.tool is None
        self._remarks: list[Diagnostic] = []
        if self.tool is None:
            self.remark("O011", f"there is no tool {name!r}; declared: {', '.join(tools.by_name) or 'none'}")
        elif self.tool.name != name:
            self.remark("O010", f"{name!r} is taken for {self.tool.name!r}")

    def add_text(self, key: str, text: str, may_repair: bool) -> bool:
        """Adds an argument that was written as text between tags; whether it is in."""
        if self.failed or self.tool is None:
            return False
        if key in self.arguments:
            self.remark("O018", f"{self.tool.name}: parameter {key!r} is given twice, the first value stands")
            return False
        types = allowed_types(self.tool.properties.get(key), self.tool.schema)
        if not text.strip() and types and "string" not in types:
            return False  # nothing stands where a number should: as if it were not given
        return self._add(key, text, value_of_text, may_repair)

    def add_json(self, key: str, value: Any, may_repair: bool) -> bool:
        """Adds an argument that was written as JSON; whether it is in."""
        return not self.failed and self._add(key, value, value_of_json, may_repair)

    def _add(self, key: str, written: Any, read: Callable[[Any, Any, Schema, bool], Value], may_repair: bool) -> bool:
        assert self.tool is not None
        if key not in self.tool.properties and not self.tool.open:
            self.remark("O016", f"{self.tool.name}: there is no parameter {key!r}, it is left out")
            return False
        try:
            found = read(written, self.tool.properties.get(key), self.tool.schema, may_repair)
        except Unfit as error:
            self.fail("O015", f"{self.tool.name}: parameter {key!r}: {error}")
            return False
        if found.repairs:
            self.remark("O013", f"{self.tool.name}: parameter {key!r} was repaired: {', '.join(found.repairs)}")
        self.arguments[key] = found.value
        return True

    def fail(self, rule: str, message: str) -> None:
        self.failed = True
        self.remark(rule, message)

    def whole(self) -> Built:
        """The call, now that all of its arguments are there."""
        if self.failed or self.tool is None:
            return Built(remarks=tuple(self._remarks))
        missing = [name for name in self.tool.required if name not in self.arguments]
        if missing:
            self.fail("O017", f"{self.tool.name}: required parameter {missing[0]!r} is missing")
        elif problem := self.tool.check.problem(self.arguments):
            self.fail("O015", f"{self.tool.name}: {problem}")
        if self.failed:
            return Built(remarks=tuple(self._remarks))
        return Built(self.tool.name, dumps(self.arguments), tuple(self._remarks))

    def remark(self, rule: str, message: str) -> None:
        self._remarks.append(Diagnostic(rule, message))


def call_of_json(tools: Tools, text: str, may_repair: bool) -> Built:
    """A call written as {"name": ..., "arguments": {...}}. may_repair: its end is certain, so what is wrong in it can be mended."""
    remarks: tuple[Diagnostic, ...] = ()
    try:
        written, error = loads(text), ""
    except NotJSON as refused:
        written, error = None, str(refused)
    if error and may_repair and (mended := repaired(text)):
        written, error = mended.value, ""
        remarks = (Diagnostic("O013", f"the call was repaired: {', '.join(mended.names)}"),)
    if error:
        return Built(remarks=(Diagnostic("O012", f"the call is not JSON: {error}"),))
    name = written.get("name") if isinstance(written, dict) else None
    if not isinstance(name, str):
        return Built(remarks=(*remarks, Diagnostic("O014", "the call is no object with a name")))
    building = Building(tools, name)
    _add_arguments(building, written, may_repair)
    built = building.whole()
    return Built(built.name, built.arguments, (*remarks, *built.remarks))


def _add_arguments(building: Building, written: Mapping[str, Any], may_repair: bool) -> None:
    if building.tool is None:
        return
    found = written.get("arguments", written.get("parameters"))
    if found is None:
        return
    if isinstance(found, str):
        try:
            found = loads(found)
        except NotJSON as error:
            mended = repaired(found) if may_repair else None
            if mended is None:
                building.fail("O012", f"{building.tool.name}: the arguments are not JSON: {error}")
                return
            found = mended.value
            building.remark("O013", f"{building.tool.name}: the arguments were repaired: {', '.join(mended.names)}")
    if not isinstance(found, dict):
        building.fail("O014", f"{building.tool.name}: the arguments are no object")
        return
    for key, value in found.items():
        building.add_json(key, value, may_repair)
