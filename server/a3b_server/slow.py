"""Clients that are too slow, on purpose or not: a connection that does not send the whole head of a request in time is closed.

uvicorn has a time-out for connections that wait between requests, and none for a head that comes letter by letter, so that a few
thousand such clients would hold every file descriptor.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol, which gives a client HEAD_SECONDS from the first byte of a request's head to its last."""

    head_seconds = HEAD_SECONDS
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self._waits_for_head():
            self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)
        super().data_received(data)
        if not self._waits_for_head():
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._waits_for_head() and not self.transport.is_closing():
            self.transport.close()
