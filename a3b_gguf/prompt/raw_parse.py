"""A rendered prompt back into the request that it was made of: what the round trip (R025) and `--fix` need.

Only the forms that the templates of this family write are read; everything else gives None, and the prompt is not judged by it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from a3b_gguf.prompt.raw_view import RawView, Turn
from a3b_gguf.strict_json import NotJSON, loads
from a3b_gguf.template import NO_OPTIONS, Template, TemplateRefused

THOUGHT = re.compile(r"<think>\n(.*?)\n?</think>\n\n", re.DOTALL)
CALLS = re.compile(r"\n?<tool_call>\n?(.*?)</tool_call>", re.DOTALL)
RESULTS = re.compile(r"<tool_response>\n(.*?)\n</tool_response>\n?", re.DOTALL)
XML_CALL = re.compile(r"\s*<function=([^>\n]+)>\n(.*)</function>\s*", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n(?=<parameter=|\Z)", re.DOTALL)
TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
CANARY = "Zcanaryz"


@dataclass(frozen=True, slots=True)
class Parsed:
    """The request, and whether an opener of the answer stands at the end. opaque: the tools are written in a form that cannot be read back
    (Qwen3-Coder's XML), so that the system turn stands for itself and is not in the request."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...]
    opened: bool
    opaque: bool = False


def parse_raw(view: RawView, template: Template) -> Parsed | None:
    """The messages and tools of a prompt without errors; None when it holds something that no template of this family writes."""
    messages: list[dict[str, Any]] = []
    tools: tuple[Any, ...] = ()
    opened, opaque = view.generation is not None, False
    for index, turn in enumerate(view.closed_turns):
        if turn.role == "system" and index == 0:
            opaque = "<tools>\n<function>" in turn.body
            found = (None, ()) if opaque else _system(turn, template)
            if found is None:
                return None
            text, tools = found
            messages += [{"role": "system", "content": text}] if text is not None else []
        elif turn.role == "user":
            messages += _user(turn.body)
        elif turn.role == "assistant":
            answer = _assistant(turn.body, len(messages))
            if answer is None:
                return None
            messages.append(answer)
        else:
            messages.append({"role": turn.role, "content": turn.body})
    _name_results(messages)
    return Parsed(tuple(messages), tools, opened, opaque)


def _system(turn: Turn, template: Template) -> tuple[str | None, tuple[Any, ...]] | None:
    """The system text, None when the turn was written for the tools alone, and the tools."""
    block = TOOLS.search(turn.body)
    if block is None:
        return turn.body, ()
    try:
        tools = tuple(loads(line) for line in block[1].split("\n"))
    except NotJSON:
        return None
    try:
        alone = _body_of_first(template.render([{"role": "user", "content": "x"}], list(tools), False))
        with_text = _body_of_first(
            template.render([{"role": "system", "content": CANARY}, {"role": "user", "content": "x"}], list(tools), False)
        )
    except TemplateRefused:
        return None
    if turn.body == alone:
        return None, tools
    before, _, after = with_text.partition(CANARY)
    if len(turn.body) >= len(before) + len(after) and turn.body.startswith(before) and turn.body.endswith(after):
        return turn.body[len(before) : len(turn.body) - len(after)], tools
    return None


def _body_of_first(prompt: str) -> str:
    return prompt.partition("\n")[2].partition("<|im_end|>")[0]


def _user(body: str) -> list[dict[str, Any]]:
    results = list(RESULTS.finditer(body))
    if results and results[0].start() == 0 and results[-1].end() == len(body) and _joined(results):
        return [{"role": "tool", "content": match[1]} for match in results]
    return [{"role": "user", "content": body}]


def _joined(matches: list[re.Match[str]]) -> bool:
    return all(before.end() == after.start() for before, after in itertools.pairwise(matches))


def _assistant(body: str, index: int) -> dict[str, Any] | None:
    message: dict[str, Any] = {"role": "assistant"}
    thought = THOUGHT.match(body)
    if thought:
        message["reasoning_content"] = thought[1]
        body = body[thought.end() :]
    calls = list(CALLS.finditer(body))
    if calls:
        found = [json_call(match[1]) if match[1].lstrip().startswith("{") else xml_call(match[1]) for match in calls]
        if any(call is None for call in found) or not _joined(calls) or body[calls[-1].end() :].strip():
            return None
        message["tool_calls"] = [
            {"id": f"call_{index}_{number}", "type": "function", "function": call} for number, call in enumerate(found)
        ]
        body = body[: calls[0].start()]
    message["content"] = body
    return message


def xml_call(inner: str) -> dict[str, Any] | None:
    """Name and arguments of `<function=...>...</function>`, values as text; None when it is not of that form to the last character."""
    match = XML_CALL.fullmatch(inner)
    if match is None:
        return None
    parameters = list(XML_PARAMETER.finditer(match[2]))
    if "".join(parameter[0] for parameter in parameters).strip() != match[2].strip():
        return None
    return {"name": match[1], "arguments": {parameter[1]: parameter[2] for parameter in parameters}}


def json_call(inner: str) -> dict[str, Any] | None:
    """Name and arguments of `{"name": ..., "arguments": {...}}`; None when it is not that."""
    try:
        value = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not isinstance(value.get("arguments"), Mapping):
        return None
    return {"name": value["name"], "arguments": dict(value["arguments"])}


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Gives each result the id of the call that it answers by its place, since the prompt holds no ids."""
    ids: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            message["tool_call_id"] = ids.pop(0) if ids else ""
        else:
            ids = [call["id"] for call in message.get("tool_calls", ())]


OPTIONS: tuple[Mapping[str, object], ...] = (
    NO_OPTIONS,
    {"enable_thinking": False},
    {"preserve_thinking": True},
    {"preserve_thinking": True, "enable_thinking": False},
    {"enable_thinking": True},
)
