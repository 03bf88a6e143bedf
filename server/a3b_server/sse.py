"""Server-sent events: how one is framed, and a sign of life while nothing comes.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

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
