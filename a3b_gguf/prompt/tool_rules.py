"""Rules over tools, calls in the history, their results, and the options that a request hands to the template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import RequestView, kind, shown, step
from a3b_gguf.strict_json import NotJSON, loads
from a3b_gguf.template import RESERVED

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SNAKE_CASE = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")


def _functions(view: RequestView) -> Iterator[tuple[str, Mapping[str, Any]]]:
    found = view.request.get("tools")
    for index, tool in enumerate(found if isinstance(found, list) else []):
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
            yield Hit(
                f"{where}.function.parameters", f"parameters is {kind(tool['function']['parameters'])}, expected a JSON Schema object"
            )


def tool_names(view: RequestView) -> Iterator[Hit]:
    for where, function in _functions(view):
        name = function.get("name")
        if not isinstance(name, str):
            yield Hit(f"{where}.name", "the function has no name" if name is None else f"the function's name is {kind(name)}")
        elif not TOOL_NAME.fullmatch(name):
            yield Hit(f"{where}.name", f"{shown(name)} is no function name")
        elif not SNAKE_CASE.fullmatch(name):
            yield Hit(
                f"{where}.name", f"{name!r} is not lower snake_case", "models copy snake_case names most reliably", severity="warning"
            )


def calls_are_a_list(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        found = entry.message.get("tool_calls")
        where = f"{entry.where}.tool_calls"
        if found is None:
            continue
        if not isinstance(found, list) or not found:
            yield Hit(
                where,
                f"tool_calls is {kind(found) if found != [] else 'an empty list'}, expected a list of calls; templates drop anything else",
            )
        elif entry.role != "assistant":
            yield Hit(where, f"tool_calls on a {entry.title} message")


def calls_are_whole(view: RequestView) -> Iterator[Hit]:
    for where, call in _calls(view):
        if not isinstance(call, Mapping):
            yield Hit(where, f"a call is {kind(call)}, expected an object")
            continue
        if not isinstance(call.get("id"), str) or not call["id"]:
            yield Hit(f"{where}.id", "the call has no id")
        if call.get("type") != "function":
            yield Hit(f"{where}.type", "the call's type is not 'function'")
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            yield Hit(f"{where}.function.name", "the call names no function")


def arguments_are_an_object(view: RequestView) -> Iterator[Hit]:
    for where, call in _calls(view):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        found, path = function.get("arguments"), f"{where}.function.arguments"
        if isinstance(found, str):
            try:
                value = loads(found)
            except NotJSON as error:
                yield Hit(path, f"arguments {shown(found)} are not JSON: {error}" + (f" at character {error.at}" if error.at >= 0 else ""))
                continue
            if not isinstance(value, Mapping):
                yield Hit(path, f"arguments hold {kind(value)}, expected an object")
        elif not isinstance(found, Mapping):
            yield Hit(
                path,
                f"arguments are {kind(found) if 'arguments' in function else 'missing'}, expected an object or a string that holds one",
            )


def _calls(view: RequestView) -> Iterator[tuple[str, Any]]:
    for entry in view.entries:
        for index, call in enumerate(entry.calls):
            yield f"{entry.where}.tool_calls[{index}]", call


def results_follow_calls(view: RequestView) -> Iterator[Hit]:
    open_calls = False
    for entry in view.entries:
        if entry.role != "tool":
            open_calls = entry.role == "assistant" and bool(entry.calls)
        elif not open_calls:
            yield Hit(entry.where, "a tool's result that follows no call; templates write it into a turn that was never opened")


def thinking_is_boolean(view: RequestView) -> Iterator[Hit]:
    options = view.request.get("chat_template_kwargs")
    if options is not None and not isinstance(options, Mapping):
        yield Hit("chat_template_kwargs", f"chat_template_kwargs is {kind(options)}, expected an object", "send an object")
    elif options is not None and not isinstance(options.get("enable_thinking", True), bool):
        found = options["enable_thinking"]
        yield Hit(
            "chat_template_kwargs.enable_thinking", f"enable_thinking is {kind(found)}; everything but false itself leaves thinking on"
        )


def options_are_the_callers(view: RequestView) -> Iterator[Hit]:
    options = view.request.get("chat_template_kwargs")
    for key in options if isinstance(options, Mapping) else ():
        if key in RESERVED:
            yield Hit(
                f"chat_template_kwargs{step(key)}", f"the option {key!r} would replace what the renderer itself hands to the template"
            )


TOOL_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M070", "error", "`tools` is a list of functions, their parameters objects.", "send a list of OpenAI function tools", tools_shape),
    Rule(
        "M071",
        "error",
        "A function's name is 1 to 64 of A-Z a-z 0-9 _ . -; other than lower snake_case is a warning.",
        "rename it",
        tool_names,
    ),
    Rule(
        "M080",
        "error",
        "`tool_calls` is a list with at least one call, on assistant messages only.",
        "send a list, or leave it out",
        calls_are_a_list,
    ),
    Rule("M081", "error", "A call has an id, type 'function' and a function's name.", "fill it in", calls_are_whole),
    Rule(
        "M082",
        "error",
        "A call's arguments are an object, or a string that parses to one.",
        "send a JSON object; {} if there are none",
        arguments_are_an_object,
    ),
    Rule(
        "M084",
        "error",
        "A tool's result follows an assistant's call, with only results between.",
        "put it after the call, or remove it",
        results_follow_calls,
    ),
)
OPTION_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M100",
        "error",
        "`chat_template_kwargs` is an object and its `enable_thinking` true or false.",
        "send true or false",
        thinking_is_boolean,
    ),
    Rule("M103", "error", "`chat_template_kwargs` replaces nothing that belongs to the renderer.", "remove it", options_are_the_callers),
)
