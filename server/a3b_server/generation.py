"""The answer to one request while it comes, and the ways in which there may be none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from a3b_server.messages import Embedded, Finished, Submit, TokenLogprobs

SHUTTING_DOWN = "the server is shutting down"


class EngineUnavailable(Exception):
    """There is no engine to ask, or it went away in the middle of an answer. retry_seconds: when it should be back; None: never."""

    def __init__(self, message: str, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class QueueFull(Exception):
    """As many requests wait as may wait. retry_seconds: when there should be room."""

    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class RequestFailed(Exception):
    """The engine goes on, but could not serve this request."""


class RequestCancelled(RequestFailed):
    """Somebody cancelled the request by its id."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A new token of a request; logprobs when it asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None


class Generation:
    """The tokens of one request, as they come. Whoever holds it must close it, or the engine works on for nobody.

    n_cached: tokens of the prompt that were not read again, known before the first token comes. cancelled: somebody did so by its id.
    """

    def __init__(self, request: Submit, cancel: Callable[[str], None]) -> None:
        self.request = request
        self.n_cached: int | None = None
        self.cancelled = False
        self._cancel = cancel
        self._items: asyncio.Queue[Drawn | Finished | Exception] = asyncio.Queue()
        self._over = False

    async def items(self) -> AsyncGenerator[Drawn | Finished, None]:
        """Tokens, then one Finished. Raises EngineUnavailable or RequestFailed instead of ending early."""
        while True:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Finished) and item.reason == "cancelled":  # not by close(): then nobody would be asking
                raise RequestCancelled("the request was cancelled") if self.cancelled else EngineUnavailable(SHUTTING_DOWN)
            yield item
            if isinstance(item, Finished):
                return

    def put(self, item: Drawn | Finished | Exception) -> None:
        self._over = self._over or not isinstance(item, Drawn)
        self._items.put_nowait(item)

    def close(self) -> None:
        """Cancels what is still running. The slot is free as soon as the engine has finished its current call."""
        if not self._over:
            self._over = True
            self._cancel(self.request.id)


class Embedding:
    """The vectors of one request, once they are there. Whoever holds it must close it, or the engine works on for nobody."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self._id, self._cancel = request_id, cancel
        self.cancelled = False
        self._found: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()

    async def vectors(self) -> tuple[bytes, ...]:
        """float32 of each text. Raises EngineUnavailable or RequestFailed."""
        return await self._found

    def put(self, item: Embedded | Exception) -> None:
        if self._found.done():  # nobody waits any more
            return
        if isinstance(item, Exception):
            self._found.set_exception(RequestCancelled("the request was cancelled") if self.cancelled else item)
        else:
            self._found.set_result(item.vectors)

    def close(self) -> None:
        if not self._found.done():
            self._found.cancel()
            self._cancel(self._id)
