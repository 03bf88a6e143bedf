"""POST /tokenize, /detokenize and /apply-template: a prompt as the model gets it, without an answer. They work while the model loads."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response

from a3b_gguf.errors import BadInput
from a3b_server.errors import APIError
from a3b_server.prompting import check_model, prompt_of
from a3b_server.refusals import told
from a3b_server.requests import check_writes, read, warning_headers
from a3b_server.responses import JSONAnswer
from a3b_server.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from a3b_server.service import Service


async def tokenize(request: Request, service: Service) -> Response:
    """Tokens of a text, with their pieces when asked. A piece that is no text by itself is a list of bytes, as in llama.cpp's server."""
    parsed = await read(TokenizeRequest, request, service)
    wanted = parsed.request
    check_model(wanted.model, service)
    text = wanted.content if wanted.content is not None else wanted.prompt
    if text is None:
        raise APIError(400, "content is missing", "missing_required_parameter", "content")
    try:
        tokens = await asyncio.to_thread(service.vocab.tokenize, text, wanted.parse_special is not False)
    except BadInput as error:
        raise APIError(400, f"content: {error.message}", "invalid_value", "content") from error
    if wanted.add_special and service.vocab.add_bos:
        tokens.insert(0, service.vocab.bos)
    listed: list[Any] = [{"id": token, "piece": _piece(token, service)} for token in tokens] if wanted.with_pieces else tokens
    return JSONAnswer({"tokens": listed, "count": len(tokens)}, headers=warning_headers(parsed.warnings))


async def detokenize(request: Request, service: Service) -> Response:
    """The text of tokens; bytes that are no character become U+FFFD."""
    parsed = await read(DetokenizeRequest, request, service)
    check_model(parsed.request.model, service)
    try:
        raw = b"".join(service.vocab.piece(token) for token in parsed.request.tokens)
    except BadInput as error:
        raise APIError(400, f"tokens: {error.message}", "invalid_value", "tokens") from error
    return JSONAnswer({"content": raw.decode(errors="replace")}, headers=warning_headers(parsed.warnings))


async def apply_template(request: Request, service: Service) -> Response:
    """The exact prompt of a chat request, which may be sent as it is, and whether the model starts in its reasoning."""
    parsed = await read(ChatRequest, request, service)
    check_model(parsed.request.model, service)
    check_writes(service)
    prompt = await asyncio.to_thread(prompt_of, parsed, service)
    tokens = prompt.tokenized.tokens
    body = {"prompt": prompt.rendered.text, "n_tokens": len(tokens), "in_thinking": prompt.in_thinking, "findings": told(prompt.findings)}
    return JSONAnswer(body, headers=warning_headers((*parsed.warnings, *prompt.warnings)))


def _piece(token: int, service: Service) -> str | list[int]:
    raw = service.vocab.piece(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
