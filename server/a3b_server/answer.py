"""Tokens of one choice to pieces of its answer, as they become certain. Streamed and whole answers are made of the same pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, TypeVar

from a3b_gguf.toolcalls import Content, Diagnostic, OutputParser, ToolCall
from a3b_gguf.toolcalls import Event as Piece
from a3b_server.constraint import Held, problems
from a3b_server.generation import Drawn, Generation
from a3b_server.messages import Finished
from a3b_server.text import TextStream
from a3b_server.usage import Usage

T = TypeVar("T")
Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class End:
    """The last piece. remarks: what was odd about the output as a whole."""

    reason: Reason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece, and the tokens that were drawn since the one before, where log-probabilities were asked for."""

    piece: Piece | End
    drawn: tuple[Drawn, ...] = ()


class Answer:
    """Reads one generation. `text` finds stop strings, `parser` splits what is left, `held` judges the whole."""

    def __init__(self, generation: Generation, text: TextStream, parser: OutputParser, held: Held) -> None:
        self._generation, self._text, self._parser, self._held = generation, text, parser, held
        self._drawn: list[Drawn] = []
        self._n_drawn = self._n_reasoning = self._n_calls = 0
        self._content: list[str] = []

    async def deltas(self) -> AsyncIterator[Delta]:
        """Pieces of the answer, then the End. Closes the generation, whatever happens. Raises what the generation raises."""
        finished = None
        try:
            async with aclosing(self._generation.items()) as items:
                async for item in items:
                    if isinstance(item, Finished):
                        finished = item
                        break
                    for piece in self._take(item):
                        yield self._out(piece)
                    if self._text.stopped or self._is_over:
                        break
        finally:
            self._generation.close()
        # A call that was cut off, by the limit or by a stop string, is never completed by guessing.
        truncated = self._text.stopped or (finished is not None and finished.reason != "stop")
        if not self._is_over:
            for piece in [*self._parser.feed(self._text.finish()), *self._parser.finish(truncated)]:
                self._note(piece)
                yield self._out(piece)
        if not truncated:
            for problem in problems(self._held, "".join(self._content), self._n_calls > 0):
                yield Delta(Diagnostic("O022", problem))
        yield self._out(End(self._reason(finished), self._usage(finished)))

    def _take(self, item: Drawn) -> Sequence[Piece]:
        self._n_drawn += 1
        self._n_reasoning += self._parser.in_reasoning
        if item.logprobs is not None:
            self._drawn.append(item)
        pieces = self._parser.feed(self._text.feed(item.token))
        for piece in pieces:
            self._note(piece)
        return pieces

    def _note(self, piece: Piece) -> None:
        self._n_calls += isinstance(piece, ToolCall)
        if isinstance(piece, Content) and self._held.check is not None:
            self._content.append(piece.text)

    @property
    def _is_over(self) -> bool:
        return self._held.one_call and self._n_calls > 0

    def _out(self, piece: Piece | End) -> Delta:
        drawn, self._drawn = tuple(self._drawn), []
        return Delta(piece, drawn)

    def _reason(self, finished: Finished | None) -> Reason:
        if finished is not None and finished.reason in ("length", "time"):
            return "length"
        return "tool_calls" if self._n_calls else "stop"

    def _usage(self, finished: Finished | None) -> Usage:
        n_prompt = len(self._generation.request.tokens)
        if finished is None:
            return Usage(n_prompt, self._n_drawn, self._generation.n_cached, self._n_reasoning)
        return Usage(n_prompt, finished.n_generated, finished.n_cached, self._n_reasoning)


async def together(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Items of several streams as they come, with the number of their stream. The first error ends them all."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    n_open = len(tasks)
    try:
        while n_open:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                n_open -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncIterator[T], queue: asyncio.Queue[tuple[int, T] | Exception | None]) -> None:
    """Puts the items into the queue, then None; or the error, which whoever reads the queue raises."""
    try:
        async for item in stream:
            queue.put_nowait((index, item))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
