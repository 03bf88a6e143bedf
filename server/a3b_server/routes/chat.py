"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from a3b_gguf.prompt import Finding
from a3b_gguf.toolcalls import OutputParser
from a3b_server.answer import Answer, together
from a3b_server.chat_objects import Head, chunks, whole
from a3b_server.prompting import Job, prepare
from a3b_server.refusals import told
from a3b_server.requests import answer_stream, answer_whole, check_writes, facts_of, read, submit_all, warning_headers
from a3b_server.schema import ChatRequest
from a3b_server.service import Service
from a3b_server.text import TextStream


async def chat_completions(request: Request, service: Service) -> Response:
    """Checks, renders and tokenizes, then answers whole or as server-sent events."""
    parsed = await read(ChatRequest, request, service)
    wanted = parsed.request
    check_writes(service)
    answer_id = f"chatcmpl-{secrets.token_hex(12)}"
    job = await asyncio.to_thread(prepare, answer_id, parsed, service, facts_of(service))
    warnings = (*parsed.warnings, *job.prompt.warnings, *job.held.warnings)
    piece = service.vocab.piece if wanted.logprobs else None
    head = Head(answer_id, int(time.time()), service.model, _told(job.prompt.findings, warnings), piece)
    generations = submit_all(service, job.submits)
    answers = [Answer(generation, _text(wanted, service), _parser(job), job.held) for generation in generations]
    choices = together([answer.deltas() for answer in answers])
    headers = warning_headers(warnings)
    if wanted.stream:
        return answer_stream(chunks(head, choices, len(answers), wanted.include_usage), generations, headers)
    return await answer_whole(request, whole(head, choices, len(answers)), generations, headers)


def _text(wanted: ChatRequest, service: Service) -> TextStream:
    return TextStream(service.vocab.piece, wanted.stop or ())


def _parser(job: Job) -> OutputParser:
    return OutputParser(job.held.tools, job.prompt.in_thinking)


def _told(findings: Sequence[Finding], warnings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"findings": told(findings), "warnings": list(warnings)}
    return {name: value for name, value in found.items() if value}
