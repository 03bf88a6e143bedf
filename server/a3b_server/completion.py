"""Tokens to OpenAI's objects. Streaming and whole answers are made of the same deltas, so they cannot differ.

Objects: https://platform.openai.com/docs/api-reference/chat; `reasoning_content` is the common extension for thinking models.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Literal

from a3b_gguf.toolcalls import Content, Diagnostic, OutputParser, Reasoning, ToolCall
from a3b_gguf.toolcalls import Event as Piece
from a3b_server.messages import Finished
from a3b_server.supervisor import Generation
from a3b_server.text import TextStream

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    n_prompt: int
    n_generated: int

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
        }


@dataclass(frozen=True, slots=True)
class End:
    """The last delta."""

    reason: Reason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer carries."""

    id: str
    created: int
    model: str

    def body(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def deltas(generation: Generation, text: TextStream, parser: OutputParser, one_call: bool = False) -> AsyncIterator[Piece | End]:
    """Pieces of the answer as they become certain, then the End. one_call: the answer ends with its first tool call.

    Closes the generation, whatever happens. Raises what the generation raises.
    """
    n_drawn, calls, finished = 0, 0, None
    try:
        async with aclosing(generation.items()) as items:
            async for token in items:
                if isinstance(token, Finished):
                    finished = token
                    break
                n_drawn += 1
                for piece in parser.feed(text.feed(token)):
                    calls += isinstance(piece, ToolCall)
                    yield piece
                if text.stopped or (one_call and calls):
                    break
    finally:
        generation.close()
    # A call that was cut off, by the limit or by a stop string, is never completed by guessing.
    truncated = text.stopped or (finished is not None and finished.reason != "stop")
    for piece in [*parser.feed(text.finish()), *parser.finish(truncated)] if not (one_call and calls) else []:
        calls += isinstance(piece, ToolCall)
        yield piece
    usage = Usage(len(generation.request.tokens), n_drawn if finished is None else finished.n_generated)
    yield End(_reason(finished, calls), usage)


def _reason(finished: Finished | None, calls: int) -> Reason:
    if finished is not None and finished.reason == "length":
        return "length"
    return "tool_calls" if calls else "stop"


async def whole(head: Head, pieces: AsyncIterator[Piece | End]) -> dict[str, Any]:
    """The chat.completion object."""
    reasoning, content, calls, remarks = "", "", [], []
    end = None
    async for piece in pieces:
        match piece:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case ToolCall():
                calls.append(_call(piece))
            case Diagnostic():
                remarks.append(asdict(piece))
            case End():
                end = piece
    assert end is not None
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.reason}
    return {**head.body("chat.completion"), "choices": [choice], "usage": end.usage.body(), **_remarks(remarks)}


async def chunks(head: Head, pieces: AsyncIterator[Piece | End], include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    """The chat.completion.chunk objects of the same answer."""

    def chunk(delta: dict[str, Any], reason: Reason | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if include_usage else {}
        return {**head.body("chat.completion.chunk"), "choices": [choice], **usage, **more}

    yield chunk({"role": "assistant", "content": ""})
    remarks: list[dict[str, Any]] = []
    async for piece in pieces:
        match piece:
            case Reasoning(text):
                yield chunk({"reasoning_content": text})
            case Content(text):
                yield chunk({"content": text})
            case ToolCall(index):
                yield chunk({"tool_calls": [{"index": index, **_call(piece)}]})
            case Diagnostic():
                remarks.append(asdict(piece))
            case End(reason, usage):
                yield chunk({}, reason, **_remarks(remarks))
                if include_usage:
                    yield {**head.body("chat.completion.chunk"), "choices": [], "usage": usage.body()}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _remarks(remarks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was odd about the output, under a member that clients do not know and skip."""
    return {"x_a3b": {"diagnostics": list(remarks)}} if remarks else {}
