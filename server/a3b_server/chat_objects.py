"""Answers of a chat as OpenAI's objects: https://platform.openai.com/docs/api-reference/chat

`reasoning_content` is the common extension for thinking models; `x_a3b` holds what clients do not know and skip: findings about the
prompt, diagnostics of the output, warnings about what was asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from a3b_gguf.toolcalls import Content, Diagnostic, Reasoning, ToolCall, ToolCallDelta
from a3b_server.answer import Delta, End, Reason
from a3b_server.generation import Drawn
from a3b_server.logprobs import chat_logprobs
from a3b_server.usage import sum_of

Choices = AsyncIterator[tuple[int, Delta]]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer carries. told: the x_a3b that is known before the answer. piece: set when log-probabilities are
    to be shown."""

    id: str
    created: int
    model: str
    told: Mapping[str, Any] = field(default_factory=dict)
    piece: Callable[[int], bytes] | None = None

    def body(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def logprobs(self, drawn: Sequence[Drawn]) -> dict[str, Any] | None:
        return None if self.piece is None else chat_logprobs(drawn, self.piece)


class _Choice:
    """Owns what one choice has come to."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.remarks: list[dict[str, Any]] = []
        self.drawn: list[Drawn] = []
        self.end: End | None = None

    def take(self, delta: Delta) -> None:
        self.drawn += delta.drawn
        match delta.piece:
            case Reasoning(text):
                self.reasoning.append(text)
            case Content(text):
                self.content.append(text)
            case ToolCall(id=name, name=function, arguments=arguments):
                self.calls.append(_call(name, function, arguments))
            case Diagnostic() as remark:
                self.remarks.append(asdict(remark))
            case End() as end:
                self.end = end

    def body(self, index: int, head: Head) -> dict[str, Any]:
        assert self.end is not None
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not content else content}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return {"index": index, "message": message, "logprobs": head.logprobs(self.drawn), "finish_reason": self.end.reason}


async def whole(head: Head, choices: Choices, count: int) -> dict[str, Any]:
    """The chat.completion object."""
    found = [_Choice() for _ in range(count)]
    async for index, delta in choices:
        found[index].take(delta)
    remarks = [remark for choice in found for remark in choice.remarks]
    usage = sum_of([choice.end.usage for choice in found if choice.end], count)
    bodies = [choice.body(index, head) for index, choice in enumerate(found)]
    return {**head.body("chat.completion"), "choices": bodies, "usage": usage.body(), **_told(head.told, remarks)}


async def chunks(head: Head, choices: Choices, count: int, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    """The chat.completion.chunk objects of the same answer."""

    def chunk(index: int, delta: dict[str, Any], drawn: Sequence[Drawn] = (), reason: Reason | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": head.logprobs(drawn) if drawn else None, "finish_reason": reason}
        usage = {"usage": None} if include_usage else {}
        return {**head.body("chat.completion.chunk"), "choices": [choice], **usage, **more}

    for index in range(count):
        yield chunk(index, {"role": "assistant", "content": ""}, **_told(head.told if index == 0 else {}, []))
    ends: dict[int, End] = {}
    remarks: dict[int, list[dict[str, Any]]] = {index: [] for index in range(count)}
    async for index, found in choices:
        match found.piece:
            case Diagnostic() as remark:
                remarks[index].append(asdict(remark))
                if found.drawn:
                    yield chunk(index, {}, found.drawn)
            case End(reason) as end:
                ends[index] = end
                yield chunk(index, {}, found.drawn, reason, **_told({}, remarks[index]))
            case piece:
                said = _said(piece)
                if said or found.drawn:
                    yield chunk(index, said, found.drawn)
    if include_usage:
        usage = sum_of([ends[index].usage for index in range(count)], count)
        yield {**head.body("chat.completion.chunk"), "choices": [], "usage": usage.body()}


def _said(piece: Reasoning | Content | ToolCallDelta | ToolCall) -> dict[str, Any]:
    """The delta that says a piece; a whole call was said by its deltas."""
    match piece:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case ToolCallDelta(index, call_id, name, arguments, is_first):
            call = _call(call_id, name, arguments) if is_first else {"function": {"arguments": arguments}}
            return {"tool_calls": [{"index": index, **call}]}
    return {}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _told(told: Mapping[str, Any], remarks: list[dict[str, Any]]) -> dict[str, Any]:
    found = {**told, **({"diagnostics": remarks} if remarks else {})}
    return {"x_a3b": found} if found else {}
