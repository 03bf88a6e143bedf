"""A connection that does not send a whole head in time is closed; CORS is off until an origin is named."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from a3b_server.app import create_app
from a3b_server.service import Options
from a3b_server.slow import ImpatientProtocol
from chat_server import chat_server
from served import served
from test_server_ops import numbers


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "head_seconds", 0.2)


def closes(url: str, *pieces: bytes) -> bytes:
    """What comes back until the server closes, after `pieces` were sent."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as client:
        for piece in pieces:
            client.sendall(piece)
        received = b""
        while more := client.recv(65536):
            received += more
        return received


def test_half_a_head_is_not_waited_for(tiny_bf16: Path, hasty: None) -> None:
    with chat_server(tiny_bf16) as running:
        assert closes(running.url) == b""
        assert closes(running.url, b"GET /health HT") == b""
        whole = closes(running.url, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 200")
        assert running.ask("capital").choices[0].message.content  # takes longer than a head may


def test_a_body_that_does_not_come_is_not_waited_for(tiny_bf16: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with chat_server(tiny_bf16, Options(body_seconds=0.2, max_body_bytes=1000)) as running:
        late = closes(running.url, head % 100, b'{"messages": [')
        assert late.startswith(b"HTTP/1.1 408")
        assert json.loads(late.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert closes(running.url, head % 2000, b"{").startswith(b"HTTP/1.1 413")  # and does not take the rest for a request
        refusals = numbers(running.client._client.get(f"{running.url}/metrics").text)
        assert (refusals["a3b_refusals_total{request_timeout}"], refusals["a3b_refusals_total{payload_too_large}"]) == (1, 1)


def test_pages_of_other_origins_may_not_ask_unless_named(tiny_bf16: Path) -> None:
    def head(url: str, origin: str) -> bytes:
        ask = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
        return closes(url, ask.encode()).partition(b"\r\n\r\n")[0].lower()

    with chat_server(tiny_bf16) as running:
        assert b"access-control" not in head(running.url, "https://page.example")
        with served(create_app(running.service, None, ("https://page.example",))) as url:
            assert b"access-control-allow-origin: https://page.example" in head(url, "https://page.example")
            assert b"access-control-allow-origin" not in head(url, "https://other.example")
