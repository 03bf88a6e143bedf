"""Continued texts as OpenAI's objects: https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from a3b_server.generation import Drawn, Generation
from a3b_server.logprobs import text_logprobs
from a3b_server.messages import Finished
from a3b_server.text import TextStream
from a3b_server.usage import Usage, sum_of


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of a text. reason and usage: with the last one."""

    text: str
    drawn: tuple[Drawn, ...] = ()
    reason: Literal["stop", "length"] | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class TextHead:
    """What every object carries. prompts: what stands before each choice's text, with `echo`. n_each: choices of each prompt.

    piece: set when log-probabilities are to be shown.
    """

    id: str
    created: int
    model: str
    prompts: Sequence[str]
    n_each: int
    told: Mapping[str, Any] = field(default_factory=dict)
    piece: Callable[[int], bytes] | None = None

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def choice(self, index: int, text: str, drawn: Sequence[Drawn], offset: int, reason: str | None) -> dict[str, Any]:
        logprobs = None if self.piece is None or not drawn else text_logprobs(drawn, self.piece, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def text_deltas(generation: Generation, text: TextStream) -> AsyncIterator[TextDelta]:
    """The text as it becomes certain. Closes the generation, whatever happens. Raises what the generation raises."""
    n_drawn, finished, waiting = 0, None, list[Drawn]()
    try:
        async with aclosing(generation.items()) as items:
            async for item in items:
                if isinstance(item, Finished):
                    finished = item
                    break
                n_drawn += 1
                if item.logprobs is not None:
                    waiting.append(item)
                if certain := text.feed(item.token):
                    yield TextDelta(certain, tuple(waiting))
                    waiting.clear()
                if text.stopped:
                    break
    finally:
        generation.close()
    n_prompt = len(generation.request.tokens)
    usage = Usage(n_prompt, n_drawn, generation.n_cached) if finished is None else Usage(n_prompt, finished.n_generated, finished.n_cached)
    reason: Literal["stop", "length"] = "length" if finished is not None and finished.reason in ("length", "time") else "stop"
    yield TextDelta(text.finish(), tuple(waiting), reason, usage)


async def whole_texts(head: TextHead, choices: AsyncIterator[tuple[int, TextDelta]]) -> dict[str, Any]:
    """The text_completion object."""
    texts = list(head.prompts)
    drawn: list[list[Drawn]] = [[] for _ in texts]
    ends: dict[int, TextDelta] = {}
    async for index, delta in choices:
        texts[index] += delta.text
        drawn[index] += delta.drawn
        if delta.reason is not None:
            ends[index] = delta
    bodies = [
        head.choice(index, text, drawn[index], len(head.prompts[index]), ends[index].reason) for index, text in enumerate(texts)
    ]
    return {**head.body(), "choices": bodies, "usage": _usage(head, ends), **_told(head)}


async def text_chunks(head: TextHead, choices: AsyncIterator[tuple[int, TextDelta]], include_usage: bool) -> AsyncIterator[dict[str, Any]]:
    """The same as a stream of text_completion objects."""
    usage = {"usage": None} if include_usage else {}
    lengths = [len(text) for text in head.prompts]
    if head.told:
        yield {**head.body(), "choices": [head.choice(0, "", (), 0, None)], **usage, **_told(head)}
    for index, text in enumerate(head.prompts):
        if text:
            yield {**head.body(), "choices": [head.choice(index, text, (), 0, None)], **usage}
    ends: dict[int, TextDelta] = {}
    async for index, delta in choices:
        if delta.reason is not None:
            ends[index] = delta
        yield {**head.body(), "choices": [head.choice(index, delta.text, delta.drawn, lengths[index], delta.reason)], **usage}
        lengths[index] += len(delta.text)
    if include_usage:
        yield {**head.body(), "choices": [], "usage": _usage(head, ends)}


def _usage(head: TextHead, ends: Mapping[int, TextDelta]) -> dict[str, Any]:
    found = [end.usage for _, end in sorted(ends.items()) if end.usage is not None]
    body = sum_of(found, head.n_each).body()
    del body["completion_tokens_details"]
    return body


def _told(head: TextHead) -> dict[str, Any]:
    return {"x_a3b": dict(head.told)} if head.told else {}
