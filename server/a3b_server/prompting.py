"""From a chat request to the tokens that the engine gets: checked, normalised, rendered, tokenized. Refuses, never repairs."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.prompt import Finding, normalise, verify_body, verify_request
from a3b_gguf.template import TemplateRefused, ends_in_thinking
from a3b_server.errors import APIError
from a3b_server.messages import Facts, Submit
from a3b_server.sampling import Sampling
from a3b_server.schema import ChatRequest
from a3b_server.service import Service

# Tokens of an answer when a request sets no limit. They are reserved while it runs, so a larger number lets fewer run at once.
DEFAULT_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """in_thinking: the model goes on inside an open think block, so that its output starts as reasoning."""

    submit: Submit
    in_thinking: bool
    tools: tuple[dict[str, Any], ...]


def read_body(data: bytes) -> dict[str, Any]:
    """The JSON object that a client sent. Raises APIError 400 with the rule that its bytes break."""
    value, findings = verify_body(data)
    _refuse_errors(findings)
    if not isinstance(value, dict):
        raise APIError(400, f"the body must be a JSON object, not {type(value).__name__}", "invalid_json")
    return value


def prepare(request_id: str, body: dict[str, Any], request: ChatRequest, service: Service, facts: Facts) -> Prompt:
    """Everything before the engine. Takes milliseconds to seconds of CPU for long prompts: call it in a thread.

    Raises APIError 400 with the rule for a prompt that breaks one, 404 for another model.
    """
    if request.model not in (None, service.model):
        raise APIError(404, f"there is no model {request.model!r}; this server has {service.model!r}", "model_not_found", "model")
    _refuse_errors(verify_request(body, service.profile, service.options.system, service.template))
    tools = tuple(request.tools or ()) if request.tool_choice != "none" else ()
    try:
        text = service.template.render(normalise(request.messages), tools or None, True, _template_options(request, service))
        tokens = service.vocab.tokenize(text, True)
    except (TemplateRefused, BadInput) as error:
        raise APIError(400, error.message, "invalid_prompt", "messages") from error
    if service.vocab.add_bos and tokens[:1] != [service.vocab.bos]:
        tokens.insert(0, service.vocab.bos)
    max_tokens = _max_tokens(len(tokens), request, facts)
    submit = Submit(request_id, tuple(tokens), max_tokens, _sampling(request, service.sampling))
    return Prompt(submit, ends_in_thinking(text), tools)


def _refuse_errors(findings: Sequence[Finding]) -> None:
    """Raises APIError 400 for the first error; the answer lists every finding."""
    first = next((finding for finding in findings if finding.severity == "error"), None)
    if first is not None:
        more = {"rule": first.rule, "fix": first.fix, "findings": [dataclasses.asdict(finding) for finding in findings]}
        param = first.where if " " not in first.where else None  # "byte 17, line 3" is a place, not a field
        raise APIError(400, f"{first.rule}: {first.where}: {first.message}; {first.fix}", "prompt_refused", param, more)


def _template_options(request: ChatRequest, service: Service) -> Mapping[str, object]:
    """Variables for the template. A request's own words stand above the server's; two different ones in a request are refused."""
    options = dict(request.chat_template_kwargs or {})
    for name in options:
        if name != "enable_thinking" and name not in service.template.variables:
            known = ", ".join(sorted(service.template.variables))
            raise APIError(
                400, f"the model's template does not read {name!r}; it reads {known}", "unknown_parameter", "chat_template_kwargs"
            )
    said = [value for value in (request.enable_thinking, options.get("enable_thinking")) if value is not None]
    if request.reasoning_effort == "none":
        said.append(False)
    if not all(isinstance(value, bool) for value in said):
        raise APIError(400, "enable_thinking must be true or false", "invalid_value", "chat_template_kwargs")
    if len(set(said)) > 1:
        raise APIError(400, "the request says both that the model shall think and that it shall not", "invalid_value", "enable_thinking")
    options.pop("enable_thinking", None)
    if said or service.options.thinking != "auto":
        options["enable_thinking"] = said[0] if said else service.options.thinking == "on"
    if options.get("enable_thinking") and said and not service.profile.thinks:
        raise APIError(400, f"{service.model} cannot think: its template has no think block", "unsupported_parameter", "enable_thinking")
    return options


def _max_tokens(n_prompt: int, request: ChatRequest, facts: Facts) -> int:
    asked = request.max_completion_tokens or request.max_tokens
    left = facts.n_ctx_seq - n_prompt
    if left < (asked or 1):
        wanted = f"{n_prompt:,} of prompt and {asked:,} to come" if asked else f"{n_prompt:,} of prompt"
        message = f"a request may have {facts.n_ctx_seq:,} tokens, this one needs {n_prompt + (asked or 1):,} ({wanted})"
        raise APIError(400, message, "context_length_exceeded", "messages")
    return asked or min(left, DEFAULT_MAX_TOKENS)


def _sampling(request: ChatRequest, default: Sampling) -> Sampling:
    chosen = {name: value for name in ("temperature", "top_k", "top_p", "min_p") if (value := getattr(request, name)) is not None}
    seed = secrets.randbits(32) if request.seed is None else request.seed
    return dataclasses.replace(default, **chosen, seed=seed & 0xFFFF_FFFF)
