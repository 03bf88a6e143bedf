"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

from a3b_gguf.toolcalls import OutputParser
from a3b_server.completion import Head, chunks, deltas, whole
from a3b_server.errors import APIError
from a3b_server.messages import Facts, Submit
from a3b_server.prompting import prepare, read_body
from a3b_server.responses import JSONAnswer
from a3b_server.schema import parse_chat
from a3b_server.service import Service
from a3b_server.sse import DONE, EventStream, frame
from a3b_server.supervisor import EngineUnavailable, Generation, QueueFull, RequestFailed
from a3b_server.text import TextStream

T = TypeVar("T")
CLIENT_GONE = 499  # nginx's word for it; nobody is there to read it


async def chat_completions(request: Request, service: Service) -> Response:
    """Checks, renders and tokenizes, then answers whole or as server-sent events."""
    body = read_body(await request.body())
    wanted = parse_chat(body)
    head = Head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), service.model)
    prompt = await asyncio.to_thread(prepare, head.id, body, wanted, service, _facts(service))
    generation = _submit(service, prompt.submit)
    text = TextStream(service.vocab.piece, wanted.stop or ())
    parser = OutputParser(prompt.tools, prompt.in_thinking)
    pieces = deltas(generation, text, parser, one_call=wanted.parallel_tool_calls is False)
    if wanted.stream:
        return EventStream(_frames(chunks(head, pieces, wanted.include_usage)), on_end=generation.close)
    try:
        answer = await _unless_gone(request, whole(head, pieces))
    except (EngineUnavailable, RequestFailed) as error:
        raise _failure(error) from error
    finally:
        generation.close()
    return Response(status_code=CLIENT_GONE) if answer is None else JSONAnswer(answer)


def _facts(service: Service) -> Facts:
    if service.engine.facts is None or service.engine.state != "ready":
        raise _unavailable(service)
    return service.engine.facts


def _submit(service: Service, submit: Submit) -> Generation:
    try:
        return service.engine.submit(submit)
    except EngineUnavailable:
        raise _unavailable(service) from None
    except QueueFull as error:
        raise APIError(503, f"{error}; try again later", "queue_full") from error


def _unavailable(service: Service) -> APIError:
    if service.engine.state == "starting":
        return APIError(503, "the model is still loading; try again later", "engine_starting")
    why = service.engine.death.message if service.engine.death else "it was stopped"
    return APIError(503, f"the engine is gone: {why}", "engine_dead")


def _failure(error: Exception) -> APIError:
    """503 when the engine went away, 500 when it could not serve this one request."""
    if isinstance(error, EngineUnavailable):
        return APIError(503, f"the engine went away before the answer was whole: {error}", "engine_dead")
    return APIError(500, str(error), "engine_failed")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client went away first; the work is cancelled then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _frames(objects: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """The answer as events. The status was sent long ago, so a failure is an event too, and no [DONE] follows it."""
    try:
        async for one in objects:
            yield frame(one)
    except (EngineUnavailable, RequestFailed) as error:
        yield frame(_failure(error).body())
        return
    yield DONE
