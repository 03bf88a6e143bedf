"""Streams of chat requests against any OpenAI-compatible server, over plain sockets, so that the client takes little of the machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """times: when each piece of text came, in seconds since `started`, the moment when the request was sent."""

    started: float
    times: tuple[float, ...]
    n_tokens: int
    n_prompt: int

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.started if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def ask(port: int, body: dict[str, Any], delay: float = 0.0) -> Answer:
    """Sends one streamed request. Raises RuntimeError when the answer is no stream."""
    await asyncio.sleep(delay)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    times: list[float] = []
    n_tokens = n_prompt = 0
    status = await reader.readline()
    while line := await reader.readline():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(event["error"])
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
            times.append(time.perf_counter())
        if usage := event.get("usage"):
            n_tokens, n_prompt = usage["completion_tokens"], usage["prompt_tokens"]
    writer.close()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}")
    return Answer(started, tuple(times), n_tokens or len(times), n_prompt)


async def wait_until_up(port: int, path: str, seconds: float = 120) -> None:
    """Returns once GET `path` answers 200. Raises RuntimeError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"nothing at port {port} after {seconds:.0f} s")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, the next one taken."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
