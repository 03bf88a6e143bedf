"""Tokens to text: characters in pieces, stop strings, and a sign of life in the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from a3b_server.sse import KEEPALIVE, EventStream, frame
from a3b_server.text import TextStream


def stream(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    """The texts that come out, and whether a stop string ended them."""
    text = TextStream(lambda token: pieces[token], stop)
    out = []
    for token in range(len(pieces)):
        out.append(text.feed(token))
        if text.stopped:
            break
    return [*out, text.finish()], text.stopped


def test_a_character_in_two_tokens_comes_out_whole() -> None:
    raw = "Santé 🙂".encode()
    assert stream([raw[:5], raw[5:9], raw[9:]], [])[0] == ["Sant", "é ", "🙂", ""]
    assert stream([raw[:5]], [])[0] == ["Sant", "\ufffd"]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    assert stream([b"a", b"S", b"T", b"x"], ["STOP"]) == (["a", "", "", "STx", ""], False)
    assert stream([b"aST", b"OP and more", b"never"], ["STOP"]) == (["a", "", ""], True)
    assert stream([b"aSTO"], ["STOP"]) == (["a", "STO"], False)
    assert stream([b"one\n\ntwo"], ["\n\n", "one\n"]) == (["", ""], True)
    assert stream(["né".encode()[:2], "né".encode()[2:]], ["é"]) == (["n", "", ""], True)


texts = st.text("ab\n🙂é", max_size=30)
stops = st.lists(st.text("ab\n🙂", min_size=1, max_size=3), max_size=3)


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 120)))
def test_however_it_is_cut_the_text_is_the_same(text: str, stop: list[str], cuts: list[int]) -> None:
    raw = text.encode()
    at = [0, *sorted(cut for cut in cuts if cut <= len(raw)), len(raw)]
    out, stopped = stream([raw[i:j] for i, j in pairwise(at)], stop)
    # The stop string that is complete first wins; of those that are complete with the same piece, the one that begins first.
    ends = [found + len(one) for one in stop if (found := text.find(one)) >= 0]
    assert stopped == bool(ends)
    said = "".join(out)
    assert text.startswith(said)
    assert said == text if not ends else len(said) < min(ends)
    assert not any(one in said for one in stop)


def test_frames_are_one_line() -> None:
    assert frame({"text": "a\nb\r\u2028é"}) == 'data: {"text":"a\\nb\\r\u2028é"}\n\n'.encode()
    assert frame({"text": "\ud800"}) == b'data: {"text":"\\ud800"}\n\n'


async def nothing() -> Any:
    await asyncio.Event().wait()


def test_a_silent_stream_shows_that_it_lives() -> None:
    sent: list[bytes] = []

    async def session() -> None:
        go_on = asyncio.Event()

        async def frames() -> AsyncIterator[bytes]:
            await go_on.wait()
            yield b"one"
            yield b"two"

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"head"))
            if message.get("body") == KEEPALIVE:
                go_on.set()

        await EventStream(frames(), lambda: None, seconds=0)({"type": "http"}, nothing, send)

    asyncio.run(session())
    assert sent[:2] == [b"head", KEEPALIVE]
    assert [found for found in sent if found != KEEPALIVE] == [b"head", b"one", b"two", b""]
    assert KEEPALIVE.startswith(b":")
    assert KEEPALIVE.endswith(b"\n\n")


def test_a_slow_client_gets_no_comment_into_a_frame() -> None:
    sent: list[bytes] = []

    async def session() -> None:
        async def frames() -> AsyncIterator[bytes]:
            yield b"one"

        async def send(message: Any) -> None:
            if message.get("body") == b"one":
                for _ in range(20):
                    await asyncio.sleep(0)
            sent.append(message.get("body", b"head"))

        await EventStream(frames(), lambda: None, seconds=0)({"type": "http"}, nothing, send)

    asyncio.run(session())
    assert [found for found in sent if found != KEEPALIVE] == [b"head", b"one", b""]
    assert KEEPALIVE not in sent[: sent.index(b"one")]


def test_what_a_stream_raises_passes_through() -> None:
    async def frames() -> AsyncIterator[bytes]:
        yield b"one"
        raise LookupError("gone")

    async def session() -> None:
        async def send(message: Any) -> None:
            pass

        await EventStream(frames(), lambda: None)({"type": "http"}, nothing, send)

    with pytest.raises(LookupError):
        asyncio.run(session())


def test_the_end_of_a_stream_is_noticed_when_sending_fails() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    ended = []

    async def session() -> None:
        sent = []

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                raise OSError("the client is gone")

        kept = endless()  # alive, so that nothing is cleaned up by chance
        with pytest.raises((OSError, ExceptionGroup, ClientDisconnect)):
            await EventStream(kept, lambda: ended.append(len(sent)))({"type": "http"}, nothing, send)

    asyncio.run(session())
    assert ended == [3]
