"""Server-sent events: how one is framed, a sign of life while nothing comes, and an end that is always noticed.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from a3b_gguf.strict_json import dumps

KEEPALIVE = b": still working\n\n"  # a comment, which clients skip
KEEPALIVE_SECONDS = 15.0  # shorter than the time-outs of common proxies, which start at 30 s
DONE = b"data: [DONE]\n\n"


def frame(data: Mapping[str, Any]) -> bytes:
    """One event. JSON escapes line breaks, so it is one line."""
    return b"data: " + dumps(data).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends frames, and calls `on_end` when the last one is sent, the client has gone away or the server stops.

    A generator's own `finally` would do for the client that goes away while it is asked for more, not for one that goes away while
    a frame is being sent: then nobody asks the generator again. seconds: after so long without a frame, as in the prefill of a long
    prompt, a comment is sent.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        super().__init__(frames, media_type="text/event-stream", headers={"Cache-Control": "no-cache", **(headers or {})})
        self._on_end, self._seconds, self._n_begun, self._n_sent = on_end, seconds, 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

    async def stream_response(self, send: Send) -> None:
        async def counted(message: Message) -> None:
            self._n_begun += 1
            await send(message)
            self._n_sent += 1

        beating = asyncio.create_task(self._beat(send))  # one a stream: one a frame costs as much as all else that is done for a frame
        try:
            await super().stream_response(counted)
        finally:
            beating.cancel()

    async def _beat(self, send: Send) -> None:
        while True:
            before = self._n_sent
            await asyncio.sleep(self._seconds)
            if self._n_sent == before == self._n_begun and before:  # nothing is being sent, and the head was
                await send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})
