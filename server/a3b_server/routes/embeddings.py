"""POST /v1/embeddings: texts to vectors, by models that pool. https://platform.openai.com/docs/api-reference/embeddings"""

from __future__ import annotations

import array
import asyncio
import base64
import secrets
from typing import Any

from fastapi import Request, Response

from a3b_gguf.errors import BadInput
from a3b_server.errors import APIError
from a3b_server.messages import Embed, Facts
from a3b_server.prompting import check_model
from a3b_server.raw_prompts import are_tokens, check_tokens
from a3b_server.requests import CLIENT_GONE, answer_waiting, facts_of, read, submit_embed, warning_headers
from a3b_server.responses import JSONAnswer
from a3b_server.schema import EmbeddingRequest
from a3b_server.service import Service

MOST_TEXTS = 2048  # as many as OpenAI takes


async def embeddings(request: Request, service: Service) -> Response:
    """One vector of length 1 for each text, in their order."""
    parsed = await read(EmbeddingRequest, request, service)
    wanted = parsed.request
    check_model(wanted.model, service)
    if not service.pools:
        message = f"{service.model} writes text and has no vectors: its file names no pooling_type; serve an embedding model for them"
        raise APIError(400, message, "model_does_not_pool", "model")
    facts = facts_of(service)
    if wanted.dimensions not in (None, facts.n_embd):
        message = f"dimensions: the vectors of {service.model} have {facts.n_embd} numbers; cut them yourself where its makers allow it"
        raise APIError(400, message, "unsupported_parameter", "dimensions")
    texts = await asyncio.to_thread(_texts, wanted.input, service, facts)
    embedding = submit_embed(service, Embed(f"embd-{secrets.token_hex(12)}", texts))
    vectors = await answer_waiting(request, embedding.vectors(), embedding.close)
    if vectors is None:
        return Response(status_code=CLIENT_GONE)
    n_tokens = sum(map(len, texts))
    service.metrics.embedded(n_tokens)
    body = await asyncio.to_thread(_body, vectors, wanted, service.model, n_tokens)
    return JSONAnswer(body, headers=warning_headers(parsed.warnings))


def _texts(found: Any, service: Service, facts: Facts) -> tuple[tuple[int, ...], ...]:
    """Tokens of every text. Raises APIError 400 that names the one at fault."""
    listed = found if isinstance(found, list) and found and not are_tokens(found) else [found]
    if len(listed) > MOST_TEXTS:
        raise APIError(400, f"input: {len(listed):,} texts, at most {MOST_TEXTS:,}", "invalid_value", "input")
    return tuple(_tokens(one, f"input.{index}" if listed is found else "input", service, facts) for index, one in enumerate(listed))


def _tokens(text: Any, where: str, service: Service, facts: Facts) -> tuple[int, ...]:
    if are_tokens(text):
        tokens = check_tokens(text, where, service)
    elif isinstance(text, str) and text:
        try:
            tokens = tuple(service.vocab.tokenize(text, False, True))
        except BadInput as error:
            raise APIError(400, f"{where}: {error.message}", "invalid_value", "input") from error
    else:
        raise APIError(400, f"{where}: expected text that is not empty, token ids, or a list of those", "invalid_value", "input")
    if not 0 < len(tokens) <= facts.n_ctx_seq:
        message = f"{where}: {len(tokens):,} tokens, a text may have {facts.n_ctx_seq:,}; --ubatch raises it as far as the model goes"
        raise APIError(400, message, "context_length_exceeded", "input")
    return tokens


def _body(vectors: tuple[bytes, ...], wanted: EmbeddingRequest, model: str, n_tokens: int) -> dict[str, Any]:
    def shown(vector: bytes) -> Any:
        return base64.b64encode(vector).decode() if wanted.encoding_format == "base64" else list(array.array("f", vector))

    data = [{"object": "embedding", "index": index, "embedding": shown(vector)} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}}
