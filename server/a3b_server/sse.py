"""Server-sent events: how one is framed, a sign of life while nothing comes, and an end that is always noticed.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from a3b_gguf.strict_json import dumps

KEEPALIVE = b": still working\n\n"  # a comment, which clients skip
KEEPALIVE_SECONDS = 15.0  # shorter than the time-outs of common proxies, which start at 30 s
DONE = b"data: [DONE]\n\n"


def frame(data: Mapping[str, Any]) -> bytes:
    """One event. JSON escapes line breaks, so it is one line."""
    return b"data: " + dumps(data).encode() + b"\n\n"


async def alive(frames: AsyncIterator[bytes], seconds: float = KEEPALIVE_SECONDS) -> AsyncIterator[bytes]:
    """`frames`, with a comment whenever none came for `seconds`, as in the prefill of a long prompt."""
    following = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=seconds)
            if not done:
                yield KEEPALIVE
                continue
            found = following.result()
            if found is None:
                return
            yield found
            following = asyncio.ensure_future(anext(frames, None))
    finally:
        following.cancel()


class EventStream(StreamingResponse):
    """Sends frames, and calls `on_end` when the last one is sent, the client has gone away or the server stops.

    A generator's own `finally` would do for the client that goes away while it is asked for more, not for one that goes away while
    a frame is being sent: then nobody asks the generator again.
    """

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(alive(frames), media_type="text/event-stream", headers={"Cache-Control": "no-cache", **(headers or {})})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
