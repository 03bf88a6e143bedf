"""Runs a model's output through the parser, in any pieces, and gathers what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from a3b_gguf.toolcalls import Content, Diagnostic, Event, OutputParser, Reasoning, ToolCall, ToolCallDelta


def tool(name: str, required: Sequence[str] = (), closed: bool = False, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(required)}
    if closed:
        schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT: dict[str, Any] = {"type": "string"}
TOOLS = [
    tool("get_weather", ["city"], city=TEXT, days={"type": "integer"}, unit={"enum": ["celsius", "fahrenheit"]}),
    tool("write_file", ["path", "content"], path=TEXT, content=TEXT),
    tool("ping"),
    tool("edit", ["edits"], edits={"type": "array"}, dry_run={"type": "boolean"}, note={"type": ["string", "null"]}),
    tool("Read", ["file_path"], closed=True, file_path=TEXT),
    {
        "type": "function",
        "function": {
            "name": "typed",
            "parameters": {
                "type": "object",
                "$defs": {"size": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}},
                "properties": {
                    "zip": TEXT,
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "size": {"$ref": "#/$defs/size"},
                    "box": {"type": "object"},
                    "list": {"type": "array"},
                    "level": {"anyOf": [{"type": "string", "enum": ["low", "high"]}, {"type": "null"}]},
                    "any": {},
                    "loop": {"$ref": "#/$defs/loop"},
                    "either": {"anyOf": [{"type": "integer"}, {}]},
                    "twice": {"anyOf": [{"$ref": "#/$defs/size"}, {"$ref": "#/$defs/size"}]},
                },
            },
        },
    },
]


@dataclass(frozen=True)
class Parsed:
    """A whole output. calls: (name, arguments parsed)."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    rules: list[str]
    raw: str
    arguments: list[str]


def parsed(events: Sequence[Event]) -> Parsed:
    calls = [event for event in events if isinstance(event, ToolCall)]
    remarks = [event for event in events if isinstance(event, Diagnostic)]
    shown = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [call.index for call in calls] == sorted({call.index for call in calls})
    for index in {delta.index for delta in shown}:
        of_one = [delta for delta in shown if delta.index == index]
        assert [delta.is_first for delta in of_one] == [True] + [False] * (len(of_one) - 1)
        assert len({(delta.id, delta.name) for delta in of_one}) == 1
        said = "".join(delta.arguments for delta in of_one)
        if (whole := next((call for call in calls if call.index == index), None)) is not None:
            assert (of_one[0].id, of_one[0].name, said) == (whole.id, whole.name, whole.arguments)
            assert events.index(whole) > events.index(of_one[-1])
        else:
            with pytest.raises(ValueError, match="."):
                json.loads(said)
    assert {call.index for call in calls} <= {delta.index for delta in shown}
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return Parsed(
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [(call.name, json.loads(call.arguments)) for call in calls],
        [remark.rule for remark in remarks],
        "".join(remark.raw for remark in remarks),
        [call.arguments for call in calls],
    )


def run(text: str, cuts: Sequence[int] = (), thinking: bool = False, truncated: bool = False, tools: Any = TOOLS) -> Parsed:
    parser = OutputParser(tools, thinking)
    events: list[Event] = []
    for start, stop in pairwise([0, *cuts, len(text)]):
        events += parser.feed(text[start:stop])
    return parsed([*events, *parser.finish(truncated)])


def pieces(text: str) -> Iterator[Sequence[int]]:
    yield ()
    for size in (1, 2, 3, 7):
        yield range(size, len(text), size)


def xml(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


PARIS = xml("get_weather", ("city", "Paris"))
WEATHER = ("get_weather", {"city": "Paris"})
INNER = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
