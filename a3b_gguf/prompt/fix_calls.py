"""Fixers of tools, of calls in the history and of their results. See `fix`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from a3b_gguf.prompt.profiles import Profile

Request = dict[str, Any]
Fixer = Callable[[Request, Profile], Iterator[tuple[str, str]]]


def _messages(request: Request) -> list[dict[str, Any]]:
    found = request.get("messages")
    return [message for message in found if isinstance(message, dict)] if isinstance(found, list) else []


def wrap_tools(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    tools = request.get("tools")
    if isinstance(tools, dict) and ("function" in tools or "name" in tools):
        tools = request["tools"] = [tools]
        yield "tools", "one tool became a list of one"
    listed: list[Any] = tools if isinstance(tools, list) else []
    for index, tool in enumerate(listed):
        if isinstance(tool, dict) and isinstance(tool.get("name"), str) and "function" not in tool:
            listed[index] = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            yield f"tools[{index}]", "a bare function was wrapped"
        elif isinstance(tool, dict) and isinstance(tool.get("function"), dict) and "type" not in tool:
            listed[index] = {"type": "function", **tool}
            yield f"tools[{index}].type", "'function' was added"


def list_calls(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(_messages(request)):
        calls = message.get("tool_calls")
        if isinstance(calls, dict) and isinstance(calls.get("function"), dict):
            message["tool_calls"] = [calls]
            yield f"messages[{index}].tool_calls", "one call became a list of one"
        elif calls == [] and message.get("content") is not None:
            del message["tool_calls"]
            yield f"messages[{index}].tool_calls", "an empty list was removed"


def complete_calls(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    """Ids and types that are missing, and the ids of results that answer such calls by their place."""
    messages = _messages(request)
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else []):
            if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
                continue
            if call.get("type") is None:
                call["type"] = "function"
                yield f"messages[{index}].tool_calls[{number}].type", "'function' was added"
            if not call.get("id"):
                call["id"] = f"call_{index}_{number}"
                yield f"messages[{index}].tool_calls[{number}].id", f"{call['id']!r} was given"


def name_results(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    """M085: results without an id, where as many calls are open as results follow."""
    messages = _messages(request)
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or message.get("role") != "assistant":
            continue
        results = _results_after(messages, index)
        nameless = all(not result.get("tool_call_id") for result in results)
        ids = [call.get("id") for call in calls if isinstance(call, dict)]
        if results and nameless and len(results) == len(ids) and all(isinstance(found, str) and found for found in ids):
            for offset, (result, found) in enumerate(zip(results, ids, strict=True)):
                result["tool_call_id"] = found
                yield f"messages[{index + 1 + offset}].tool_call_id", f"{found!r} was given, by its place"


def _results_after(messages: Sequence[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    results = []
    for message in messages[index + 1 :]:
        if message.get("role") != "tool":
            break
        results.append(message)
    return results


def fill_arguments(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(_messages(request)):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else []):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and function.get("arguments") in (None, ""):
                function["arguments"] = "{}"
                yield f"messages[{index}].tool_calls[{number}].function.arguments", "no arguments became {}"


def order_results(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    messages = request["messages"]
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(calls, list):
            continue
        order = {call.get("id"): number for number, call in enumerate(calls) if isinstance(call, dict) and isinstance(call.get("id"), str)}
        results = _results_after(messages, index)
        if len(results) > 1 and all(isinstance(r.get("tool_call_id"), str) and r["tool_call_id"] in order for r in results):
            ordered = sorted(results, key=lambda result: order[result["tool_call_id"]])
            if ordered != results:
                messages[index + 1 : index + 1 + len(results)] = ordered
                yield f"messages[{index + 1}]", "results were put into the order of their calls"


CALL_FIXERS: Sequence[tuple[str, Fixer]] = (
    ("M070", wrap_tools),
    ("M080", list_calls),
    ("M081", complete_calls),
    ("M085", name_results),
    ("M082", fill_arguments),
    ("M087", order_results),
)
