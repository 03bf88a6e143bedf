"""Prompts of POST /v1/completions: text or token ids as they are, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.prompt import Finding, verify_raw
from a3b_server.constraint import own_grammar
from a3b_server.drawing import sampling_of
from a3b_server.errors import APIError
from a3b_server.messages import Facts, Submit
from a3b_server.prompting import check_model, choices, max_tokens
from a3b_server.refusals import refuse_errors
from a3b_server.schema import CompletionRequest
from a3b_server.service import Service

MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class RawJob:
    """submits: every choice of the first prompt, then of the next. texts: of the prompts. findings: about prompts that are chats."""

    submits: tuple[Submit, ...]
    texts: tuple[str, ...]
    findings: tuple[Finding, ...]


def prepare_raw(request_id: str, request: CompletionRequest, service: Service, facts: Facts) -> RawJob:
    """Everything before the engine. Raises APIError 400 that names the field, 404 for another model."""
    check_model(request.model, service)
    if request.echo and request.logprobs is not None:
        raise APIError(400, "echo with logprobs is not served: the prompt's own are not computed", "unsupported_parameter", "echo")
    prompts = _prompts(request.prompt, service)
    grammar = own_grammar(request.grammar, service) if request.grammar else None
    sampling = sampling_of(request, service.sampling, service.vocab.n_tokens, grammar, request.logprobs)
    submits: list[Submit] = []
    for index, tokens in enumerate(prompts):
        limit = max_tokens(len(tokens), request.max_tokens, facts, "prompt")
        name = f"{request_id}-{index}" if len(prompts) > 1 else request_id
        submits += choices(Submit(name, tokens, limit, sampling, time_limit_s=request.time_limit_s), request.n_choices)
    listed = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    findings = tuple(finding for text in listed if isinstance(text, str) for finding in _findings(text, service))
    texts = tuple(b"".join(map(service.vocab.piece, tokens)).decode(errors="replace") for tokens in prompts)
    return RawJob(tuple(submits), texts, findings)


def _prompts(prompt: Any, service: Service) -> list[tuple[int, ...]]:
    if isinstance(prompt, str) or are_tokens(prompt):
        return [_tokens(prompt, service)]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or are_tokens(one) for one in prompt):
        if len(prompt) > MOST_PROMPTS:
            raise APIError(400, f"prompt: {len(prompt)} prompts, at most {MOST_PROMPTS}", "invalid_value", "prompt")
        return [_tokens(one, service) for one in prompt]
    raise APIError(400, "prompt: expected text, token ids, or a list of those", "invalid_value", "prompt")


def are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _tokens(prompt: str | list[int], service: Service) -> tuple[int, ...]:
    """A raw prompt is its sender's own: control tokens in it are meant."""
    vocab = service.vocab
    if isinstance(prompt, list):
        return check_tokens(prompt, "prompt", service)
    try:
        tokens = vocab.tokenize(prompt, True)
    except BadInput as error:
        raise APIError(400, f"prompt: {error.message}", "invalid_value", "prompt") from error
    if vocab.add_bos and tokens[:1] != [vocab.bos]:
        tokens.insert(0, vocab.bos)
    if not tokens:
        raise APIError(400, "prompt: there is nothing to go on from", "invalid_value", "prompt")
    return tuple(tokens)


def check_tokens(tokens: list[int], where: str, service: Service) -> tuple[int, ...]:
    """The same tokens. Raises APIError 400 for one that there is not."""
    n_tokens = service.vocab.n_tokens
    wrong = next((token for token in tokens if not 0 <= token < n_tokens), None)
    if wrong is not None:
        raise APIError(400, f"{where}: {wrong} is no token; tokens are 0 to {n_tokens - 1:,}", "invalid_value", where.split(".")[0])
    return tuple(tokens)


def _findings(text: str, service: Service) -> Sequence[Finding]:
    """What the rules say about a prompt that is a chat; strict mode refuses by them. Text without turns is no chat."""
    starts = service.profile.turn_starts
    if not any(start in text for start in starts):
        return ()
    try:
        findings = verify_raw(text, service.profile, service.options.system)
    except BadInput:  # turns of a form that the rules do not know
        return ()
    if service.options.mode == "strict":
        refuse_errors(findings, "strict")
    return tuple(finding for finding in findings if finding.severity != "note")
