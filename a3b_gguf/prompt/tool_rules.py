"""Rules over the tools that a request offers, and which of them must be used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from a3b_gguf.prompt.findings import Hit, Rule, Severity
from a3b_gguf.prompt.schema import grammar_problems, schema_problems
from a3b_gguf.prompt.view import RequestView, kind, shown

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SNAKE_CASE = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
NOT_IN_XML = re.compile(r"[<>=\s]")


def functions(view: RequestView) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each function that `tools` declares, with its path."""
    for index, tool in enumerate(view.tools):
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            yield f"tools[{index}].function", tool["function"]


def tools_shape(view: RequestView) -> Iterator[Hit]:
    found = view.request.get("tools")
    if found is not None and not isinstance(found, list):
        yield Hit("tools", f"tools is {kind(found)}, expected a list; templates ignore anything else")
        return
    for index, tool in enumerate(found or []):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
            yield Hit(where, 'expected {"type": "function", "function": {...}}')
        elif not isinstance(tool["function"].get("parameters", {}), Mapping):
            found_kind = kind(tool["function"]["parameters"])
            yield Hit(f"{where}.function.parameters", f"parameters is {found_kind}, expected a JSON Schema object")


def tool_names(view: RequestView) -> Iterator[Hit]:
    for where, function in functions(view):
        name = function.get("name")
        if not isinstance(name, str):
            yield Hit(f"{where}.name", "the function has no name" if name is None else f"the function's name is {kind(name)}")
        elif not TOOL_NAME.fullmatch(name):
            yield Hit(f"{where}.name", f"{shown(name)} is no function name")
        elif not SNAKE_CASE.fullmatch(name):
            yield Hit(
                f"{where}.name", f"{name!r} is not lower snake_case", "models copy snake_case names most reliably", severity="warning"
            )


def name_key(name: str) -> str:
    """What two spellings of one name share: case and separators do not count."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[-_. /]+", "_", snake).strip("_").lower()


def names_are_distinct(view: RequestView) -> Iterator[Hit]:
    seen: dict[str, tuple[str, str]] = {}
    for where, function in functions(view):
        name = function.get("name")
        if not isinstance(name, str):
            continue
        if name_key(name) in seen:
            other, place = seen[name_key(name)]
            what = "the same name as" if other == name else f"too like {other!r} of"
            yield Hit(f"{where}.name", f"{name!r} is {what} {place}: a call could mean either")
        else:
            seen[name_key(name)] = (name, where)


def parameters_are_a_schema(view: RequestView) -> Iterator[Hit]:
    for where, function in functions(view):
        parameters = function.get("parameters")
        for path, problem in schema_problems(parameters) if isinstance(parameters, Mapping) else ():
            yield Hit(f"{where}.parameters{path}", problem)


def parameters_can_be_carried(view: RequestView) -> Iterator[Hit]:
    for where, function in functions(view):
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for name in properties if isinstance(properties, Mapping) else ():
            if isinstance(name, str) and (NOT_IN_XML.search(name) or not name):
                severity: Severity | None = None if view.profile.call_style == "xml" else "warning"
                message = f"the parameter {shown(name)} cannot be written as <parameter=...>"
                yield Hit(f"{where}.parameters.properties", message, severity=severity)


def schema_fits_a_grammar(view: RequestView) -> Iterator[Hit]:
    for where, function in functions(view):
        for path, problem in grammar_problems(function.get("parameters")):
            yield Hit(f"{where}.parameters{path}", problem)


def template_shows_tools(view: RequestView) -> Iterator[Hit]:
    if view.tools and view.profile.tools_place == "none":
        yield Hit("tools", f"the template of {view.profile.name} does not show tools to the model")


def choice_names_a_tool(view: RequestView) -> Iterator[Hit]:
    choice = view.request.get("tool_choice")
    names = [function.get("name") for _, function in functions(view)]
    if choice in (None, "auto", "none"):
        return
    if choice == "required":
        if not names:
            yield Hit("tool_choice", "a tool is required, and there are no tools")
        return
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        yield Hit("tool_choice", 'expected auto, none, required, or {"type": "function", "function": {"name": ...}}')
    elif name not in names:
        yield Hit("tool_choice.function.name", f"there is no tool {shown(name)}")


TOOL_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M070", "error", "`tools` is a list of functions, their parameters objects.", "send a list of OpenAI function tools", tools_shape),
    Rule(
        "M071",
        "error",
        "A function's name is 1 to 64 of A-Z a-z 0-9 _ . -; other than lower snake_case is a warning.",
        "rename it",
        tool_names,
    ),
    Rule("M072", "error", "Names of functions are distinct, also when case and separators do not count.", "rename one", names_are_distinct),
    Rule("M073", "error", "Parameters are a JSON Schema of type object.", "mend the schema", parameters_are_a_schema),
    Rule(
        "M074",
        "error",
        "Names of parameters hold no `<`, `>`, `=` or whitespace; a warning where calls are written as JSON.",
        "rename it",
        parameters_can_be_carried,
    ),
    Rule(
        "M075",
        "warning",
        "A schema can become a grammar: at most 2,000 repetitions, references that lead somewhere, no deep unions.",
        "relax it",
        schema_fits_a_grammar,
    ),
    Rule("M077", "error", "The template shows the tools.", "use a model or template that takes tools", template_shows_tools),
    Rule("M078", "error", "`tool_choice` names a tool of the request.", "name one of `tools`, or leave it out", choice_names_a_tool),
)
