"""Log-probabilities in the two forms of OpenAI's API: a list of tokens in chats, parallel lists in completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from a3b_server.generation import Drawn

Piece = Callable[[int], bytes]
LEAST = -9999.0  # what OpenAI says for a token that cannot come; JSON has no infinity


def chat_logprobs(drawn: Sequence[Drawn], piece: Piece) -> dict[str, Any]:
    """The `logprobs` of a chat choice. Every token is listed, those of the reasoning and of markup among them."""
    content = [
        {
            **_entry(item.token, item.logprobs.logprob, piece),
            "top_logprobs": [_entry(token, logprob, piece) for token, logprob in item.logprobs.top],
        }
        for item in drawn
        if item.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def text_logprobs(drawn: Sequence[Drawn], piece: Piece, offset: int) -> dict[str, Any]:
    """The `logprobs` of a text choice. offset: characters of the text before these tokens."""
    tokens = [_text(piece(item.token)) for item in drawn]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    known = [item.logprobs for item in drawn if item.logprobs is not None]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(found.logprob) for found in known],
        "top_logprobs": [{_text(piece(token)): _finite(logprob) for token, logprob in found.top} for found in known],
        "text_offset": offsets,
    }


def _entry(token: int, logprob: float, piece: Piece) -> dict[str, Any]:
    raw = piece(token)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
