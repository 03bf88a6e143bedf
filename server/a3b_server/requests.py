"""What every endpoint that takes a body does with it, and what becomes of work for a client that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from a3b_server.errors import APIError
from a3b_server.generation import Embedding, EngineUnavailable, Generation, QueueFull, RequestCancelled, RequestFailed
from a3b_server.messages import Embed, Facts, Submit
from a3b_server.parse import Parsed, parse, read_json
from a3b_server.responses import JSONAnswer
from a3b_server.service import Service
from a3b_server.sse import DONE, EventStream, frame

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
CLIENT_GONE = 499  # nginx's word for it; nobody is there to read it
STARTING_SECONDS = 5


async def read(kind: type[Model], request: Request, service: Service) -> Parsed[Model]:
    """The request in the body. Raises APIError 400, 415, 413 before more than the limit was read, 408 when nothing comes for too long."""
    encoding = request.headers.get("content-encoding") or "identity"
    if encoding.lower() != "identity":
        message = f"a body of Content-Encoding {encoding[:40]} is not read; send it as it is"
        raise APIError(415, message, "unsupported_encoding", "Content-Encoding")
    limit = service.options.max_body_bytes
    too_large = APIError(413, f"the body is larger than {limit:,} bytes", "payload_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    found = bytearray()
    async for chunk in _pieces(request, service.options.body_seconds):
        found += chunk
        if len(found) > limit:
            raise too_large
    return await asyncio.to_thread(parse_body, kind, bytes(found), service)


async def _pieces(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """The body as it comes. seconds: how long a client may be silent in the middle of it."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(seconds):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise APIError(408, f"the rest of the body did not come within {seconds:g} s", "request_timeout") from None
        except ClientDisconnect:
            raise APIError(CLIENT_GONE, "the client went away before its request was whole", "client_gone") from None
        if chunk is None:
            return
        yield chunk


def parse_body(kind: type[Model], data: bytes, service: Service) -> Parsed[Model]:
    return parse(kind, read_json(data), service.options.unknown)


def check_writes(service: Service) -> None:
    """Raises APIError 400 for a model that writes no text."""
    if service.pools:
        message = f"{service.model} is an embedding model: it turns texts into vectors and writes none; send them to POST /v1/embeddings"
        raise APIError(400, message, "model_writes_no_text", "model")


def facts_of(service: Service) -> Facts:
    """What the engine is. Raises APIError 503 while there is none."""
    if service.engine.facts is None or service.engine.state in ("starting", "dead"):
        raise _unavailable(service)
    return service.engine.facts


def submit_all(service: Service, submits: Sequence[Submit]) -> list[Generation]:
    """Hands every choice to the engine, or none of them."""
    generations: list[Generation] = []
    try:
        for submit in submits:
            generations.append(service.engine.submit(submit))
    except (EngineUnavailable, QueueFull) as error:
        close_all(generations)
        raise _turned_away(service, error) from error
    return generations


def submit_embed(service: Service, embed: Embed) -> Embedding:
    """Hands texts to an engine that pools."""
    try:
        return service.engine.embed(embed)
    except (EngineUnavailable, QueueFull) as error:
        raise _turned_away(service, error) from error


def _turned_away(service: Service, error: EngineUnavailable | QueueFull) -> APIError:
    if isinstance(error, QueueFull):
        return APIError(503, f"{error}; try again later", "queue_full", retry_seconds=error.retry_seconds)
    return _unavailable(service, error.retry_seconds)


def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


async def answer_whole(
    request: Request, work: Coroutine[Any, Any, dict[str, Any]], generations: Sequence[Generation], headers: dict[str, str]
) -> Response:
    """The object that `work` makes, as JSON. Ends the generations when the client goes away."""
    answer = await answer_waiting(request, work, lambda: close_all(generations))
    return Response(status_code=CLIENT_GONE) if answer is None else JSONAnswer(answer, headers=headers)


async def answer_waiting(request: Request, work: Coroutine[Any, Any, T], close: Callable[[], None]) -> T | None:
    """What `work` comes to; None when the client went away first. `close` is called in any case."""
    try:
        return await _unless_gone(request, work)
    except (EngineUnavailable, RequestFailed) as error:
        raise _failure(error) from error
    finally:
        close()


def answer_stream(objects: AsyncIterator[dict[str, Any]], generations: Sequence[Generation], headers: dict[str, str]) -> Response:
    """The objects as server-sent events."""
    return EventStream(_frames(objects), on_end=lambda: close_all(generations), headers=headers)


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """A header is Latin-1 at most, and a line; what else a client wrote is escaped."""
    shown = "; ".join(warnings).encode("unicode_escape").decode()[:1000]
    return {"X-A3B-Warnings": shown} if shown else {}


def _unavailable(service: Service, retry_seconds: int | None = None) -> APIError:
    if service.engine.state == "starting":
        wait = STARTING_SECONDS if retry_seconds is None else retry_seconds
        return APIError(503, "the model is still loading; try again later", "engine_starting", retry_seconds=wait)
    why = service.engine.death.message if service.engine.death else "it was stopped"
    return APIError(503, f"the engine is gone: {why}", "engine_dead")


def _failure(error: Exception) -> APIError:
    """503 when the engine went away, 409 when the request was cancelled by its id, 500 when it could not be served."""
    if isinstance(error, EngineUnavailable):
        message = f"the engine went away before the answer was whole: {error}"
        return APIError(503, message, "engine_dead", retry_seconds=error.retry_seconds)
    if isinstance(error, RequestCancelled):
        return APIError(409, str(error), "request_cancelled")
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
