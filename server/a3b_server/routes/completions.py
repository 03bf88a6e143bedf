"""POST /v1/completions: text goes on from a prompt that is sent as it is."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from fastapi import Request, Response

from a3b_server.answer import together
from a3b_server.raw_prompts import prepare_raw
from a3b_server.refusals import told
from a3b_server.requests import answer_stream, answer_whole, check_writes, facts_of, read, submit_all, warning_headers
from a3b_server.schema import CompletionRequest
from a3b_server.service import Service
from a3b_server.text import TextStream
from a3b_server.text_objects import TextHead, text_chunks, text_deltas, whole_texts


async def completions(request: Request, service: Service) -> Response:
    """Tokenizes, then answers whole or as server-sent events. Choices are numbered through all prompts."""
    parsed = await read(CompletionRequest, request, service)
    wanted = parsed.request
    check_writes(service)
    answer_id = f"cmpl-{secrets.token_hex(12)}"
    job = await asyncio.to_thread(prepare_raw, answer_id, wanted, service, facts_of(service))
    told_before: dict[str, Any] = {"findings": told(job.findings), "warnings": list(parsed.warnings)}
    head = TextHead(
        answer_id,
        int(time.time()),
        service.model,
        prompts=[text if wanted.echo else "" for text in job.texts for _ in range(wanted.n_choices)],
        n_each=wanted.n_choices,
        told={name: value for name, value in told_before.items() if value},
        piece=service.vocab.piece if wanted.logprobs is not None else None,
    )
    generations = submit_all(service, job.submits)
    stops = wanted.stop or ()
    choices = together([text_deltas(generation, TextStream(service.vocab.piece, stops)) for generation in generations])
    headers = warning_headers(parsed.warnings)
    if wanted.stream:
        return answer_stream(text_chunks(head, choices, wanted.include_usage), generations, headers)
    return await answer_whole(request, whole_texts(head, choices), generations, headers)
