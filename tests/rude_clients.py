"""Clients of every kind for a server under load: honest ones, those that go away, and those that send what is no request."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def body_of(question: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "enable_thinking": False, "temperature": 0, **more}


def raw_request(body: bytes, *headers: bytes) -> bytes:
    return HEAD + b"".join(header + b"\r\n" for header in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def sized(length: bytes, body: bytes = b"{}") -> bytes:
    """A request whose Content-Length is `length`, whatever the body is."""
    return HEAD + b"Content-Length: " + length + b"\r\n\r\n" + body


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# What is sent; the connection is then closed for writing.
GARBAGE: Mapping[str, bytes] = {
    "nothing": b"",
    "binary": bytes(range(256)) * 40,
    "zeros": bytes(5000),
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20),
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "another version": b"GET /health HTTP/two\r\nHost: x\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "no host": b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
    "half a request line": b"POST /v1/ch",
    "half a head": HEAD + b"X-Half: ye",
    "a head of one endless line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge header": HEAD + b"X-Large: " + b"a" * 200_000 + b"\r\n\r\n",
    "a thousand headers": HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(5000)) + b"\r\n",
    "a header without a name": HEAD + b": a\r\n\r\n",
    "a header that is no text": HEAD + b"X-\x00\xff: \x00\x01\r\n\r\n",
    "bare line ends": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
    "a length that is no number": sized(b"many"),
    "a negative length": sized(b"-1"),
    "a length with a sign": sized(b"+2"),
    "two lengths": sized(b"2\r\nContent-Length: 3"),
    "a length that is too long": sized(b"100", b'{"messages": ['),
    "a length that is too short": sized(b"1", b'{"messages": []}'),
    "a huge length": sized(b"9" * 30),
    "more than the limit": sized(b"%d" % (1 << 30), b"a" * 1000),
    "length and chunks": sized(b"2\r\nTransfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n"),
    "chunks that are none": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "half a chunk": CHUNKED + b"100\r\n{",
    "a negative chunk": CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n",
    "an endless chunk": CHUNKED + b"ffffffffffffffff\r\n{}",
    "no body": raw_request(b""),
    "half an object": raw_request(b'{"messages": [{"role": "user", "cont'),
    "no JSON": raw_request(b"messages=hello&max_tokens=5"),
    "bytes that are no text": raw_request(b'{"messages": "\xff\xfe\x00"}'),
    "deep nesting": raw_request(b"[" * 50_000),
    "a number": raw_request(b"1" * 5000),
    "a list": raw_request(b'[{"messages": []}]'),
    "another shape": raw_request(b'{"messages": {"role": "user"}}'),
    "wrong fields": raw_request(b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": "many", "stream": 7}'),
    "wrong values": raw_request(b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -5, "temperature": 1e999}'),
    "a twin": raw_request(b'{"messages": [], "messages": []}'),
    "compressed": raw_request(b"\x1f\x8b\x08\x00" + bytes(50), b"Content-Encoding: gzip"),
    "two requests, the second torn": raw_request(b"{}") + HEAD[:20],
    "a path that is none": b"POST /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method that is none": b"FETCH /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


def address_of(url: str) -> Address:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Address(parts.hostname, parts.port)


async def honest(address: Address, question: str, max_tokens: int, stream: bool) -> str:
    """The answer, whole or streamed; anything but an answer fails."""
    body = json.dumps(body_of(question, max_tokens=max_tokens, stream=stream)).encode()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(raw_request(body, b"Connection: close"))
    head = await reader.readuntil(b"\r\n\r\n")
    received = await reader.read()
    await gone(writer)
    assert head.startswith(b"HTTP/1.1 200"), (head, received)
    if not stream:
        said: str = json.loads(received)["choices"][0]["message"]["content"]
        return said
    text = b"".join(chunks_of(received)).decode()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"])


def chunks_of(body: bytes) -> Iterator[bytes]:
    """Takes the transfer encoding off."""
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def vanishing(address: Address, chance: random.Random) -> str:
    """Goes away in the middle of its answer, or earlier; says where."""
    stream = chance.random() < 0.8
    body = json.dumps(body_of(f"Count to {chance.randrange(100)}.", max_tokens=1000, ignore_eos=True, stream=stream)).encode()
    request = raw_request(body)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    where = chance.choice(("the answer", "the answer", "the answer", "the request", "the wait"))
    if where == "the request":
        writer.write(request[: chance.randrange(1, len(request))])
        await writer.drain()
    else:
        writer.write(request)
        await writer.drain()
    if where == "the answer" and stream:
        for _ in range(chance.randrange(1, 12)):
            await reader.readuntil(b"data: ")
    if chance.random() < 0.5:
        writer.transport.abort()  # unread bytes make it a reset
    await gone(writer)
    return where if stream else f"{where}, whole"


async def garbage(address: Address, sent: bytes) -> bytes:
    """What comes back until the server closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    received = b""
    try:
        writer.write(sent)
        await writer.drain()
        writer.write_eof()
        received = await reader.read()
    except OSError:  # it was closed before all of it was read
        pass
    finally:
        writer.transport.abort()
        await gone(writer)
    return received


async def gone(writer: asyncio.StreamWriter) -> None:
    """Closes, and waits until the socket is."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
