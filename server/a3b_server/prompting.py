"""From a chat request to the tokens that the engine gets: checked, normalised, rendered, tokenized. Refuses, never repairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.prompt import (
    Finding,
    NotApart,
    Rendered,
    TokenizedPrompt,
    normalise,
    render_apart,
    template_finding,
    tokenize_rendered,
    verify_request,
)
from a3b_gguf.template import TemplateRefused, ends_in_thinking
from a3b_server.constraint import Held, held_to
from a3b_server.drawing import of_choice, sampling_of
from a3b_server.errors import APIError
from a3b_server.messages import Facts, Submit, ThinkBudget
from a3b_server.parse import Parsed
from a3b_server.refusals import refuse_errors, worth_telling
from a3b_server.schema import ChatRequest, TemplateRequest, check_chat
from a3b_server.service import Service

# Tokens of an answer when a request sets no limit. They are reserved while it runs, so a larger number lets fewer run at once.
DEFAULT_MAX_TOKENS = 4096
MAPPED_DEVELOPER = "M024"  # says what --map-developer does, and is no reason to refuse
CLOSE_REASONING = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as tokens. in_thinking: the model goes on inside an open think block, so that its output starts as reasoning.

    findings: warnings of the rules, for the answer.
    """

    rendered: Rendered
    tokenized: TokenizedPrompt
    in_thinking: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What the engine is to do, one Submit for each choice, and how its output is to be read."""

    submits: tuple[Submit, ...]
    prompt: Prompt
    held: Held


def prepare(request_id: str, parsed: Parsed[ChatRequest], service: Service, facts: Facts) -> Job:
    """Everything before the engine. Takes milliseconds to seconds of CPU for long prompts: call it in a thread.

    Raises APIError 400 with the rule for a prompt that breaks one, 404 for another model.
    """
    request = parsed.request
    check_model(request.model, service)
    check_chat(request)
    shown_tools = list(request.tools or ()) if request.tool_choice != "none" else []
    prompt = prompt_of(request, parsed.body, shown_tools, service)
    held = held_to(request, service, prompt.in_thinking)
    tokens = prompt.tokenized.tokens
    asked = request.max_completion_tokens or request.max_tokens
    sampling = sampling_of(request, service.sampling, service.vocab.n_tokens, held.grammar, request.n_logprobs)
    submit = Submit(
        request_id,
        tokens,
        max_tokens(len(tokens), asked, facts),
        sampling,
        marks=prompt.tokenized.marks,
        time_limit_s=request.time_limit_s,
        think=_budget(request, service) if prompt.in_thinking else None,
    )
    return Job(choices(submit, request.n_choices), prompt, held)


def choices(submit: Submit, count: int) -> tuple[Submit, ...]:
    """The same prompt several times; each choice has an id and a seed of its own."""
    if count == 1:
        return (submit,)
    return tuple(replace(submit, id=f"{submit.id}-{index}", sampling=of_choice(submit.sampling, index)) for index in range(count))


def prompt_of(request: ChatRequest | TemplateRequest, body: dict[str, Any], tools: list[Any], service: Service) -> Prompt:
    """Checks, renders once, and tokenizes so that no text of the request becomes a control token. Raises APIError 400 with the rule."""
    options = service.options
    findings = verify_request(body, service.profile, options.system, controls=options.controls, developer=options.developer)
    mapped = [finding for finding in findings if not (finding.rule == MAPPED_DEVELOPER and options.developer == "system")]
    refuse_errors(mapped, options.mode)
    messages = normalise(request.messages, options.developer)
    template_options = _template_options(request, service)
    continues = request.continue_final_message is True
    try:
        rendered = render_apart(service.template, messages, tools or None, service.profile.controls, template_options, continues)
        tokenized = tokenize_rendered(rendered, service.vocab, service.controls, service.profile.turn_starts)
    except (TemplateRefused, NotApart) as error:
        refuse_errors([*findings, template_finding(error)])
        raise
    except BadInput as error:
        raise APIError(400, error.message, "invalid_prompt", "messages") from error
    return Prompt(rendered, tokenized, ends_in_thinking(rendered.text), worth_telling(findings))


def check_model(name: str | None, service: Service) -> None:
    """Raises APIError 404 for another model than the one that is served."""
    if name not in (None, service.model):
        raise APIError(404, f"there is no model {name!r}; this server has {service.model!r}", "model_not_found", "model")


def max_tokens(n_prompt: int, asked: int | None, facts: Facts, param: str = "messages") -> int:
    """Tokens that the answer may have. Raises APIError 400 when a sequence has no room for them."""
    left = facts.n_ctx_seq - n_prompt
    if left < (asked or 1):
        wanted = f"{n_prompt:,} of prompt and {asked:,} to come" if asked else f"{n_prompt:,} of prompt"
        message = f"a request may have {facts.n_ctx_seq:,} tokens, this one needs {n_prompt + (asked or 1):,} ({wanted})"
        raise APIError(400, message, "context_length_exceeded", param)
    return asked or min(left, DEFAULT_MAX_TOKENS)


def _budget(request: ChatRequest, service: Service) -> ThinkBudget | None:
    limit = request.thinking_budget or service.options.thinking_budget
    return None if limit is None else ThinkBudget(limit, tuple(service.vocab.tokenize(CLOSE_REASONING, True)))


def _template_options(request: ChatRequest | TemplateRequest, service: Service) -> dict[str, object]:
    """Variables for the template. A request's own words stand above the server's; two different ones in a request are refused."""
    options = dict(request.chat_template_kwargs or {})
    for name in options:
        if name != "enable_thinking" and name not in service.template.variables:
            known = ", ".join(sorted(service.template.variables))
            raise APIError(
                400, f"the model's template does not read {name!r}; it reads {known}", "unknown_parameter", "chat_template_kwargs"
            )
    said = [value for value in (request.enable_thinking, options.pop("enable_thinking", None)) if value is not None]
    if request.reasoning_effort == "none":
        said.append(False)
    elif request.reasoning_effort is not None:
        options["reasoning_effort"] = _effort(request.reasoning_effort, service)
    if not all(isinstance(value, bool) for value in said):
        raise APIError(400, "enable_thinking must be true or false", "invalid_value", "chat_template_kwargs")
    if len(set(said)) > 1:
        raise APIError(400, "the request says both that the model shall think and that it shall not", "invalid_value", "enable_thinking")
    if said or service.options.thinking != "auto":
        options["enable_thinking"] = said[0] if said else service.options.thinking == "on"
    if options.get("enable_thinking") and said and not service.profile.thinks:
        raise APIError(400, f"{service.model} cannot think: its template has no think block", "unsupported_parameter", "enable_thinking")
    return options


def _effort(wanted: str, service: Service) -> str:
    known = service.profile.efforts
    if wanted not in known:
        takes = f"it takes none, {', '.join(known)}" if known else "leave it out or send none"
        message = f"reasoning_effort: {wanted[:40]!r} is not served by {service.model}; {takes}"
        raise APIError(400, message, "unsupported_parameter", "reasoning_effort")
    return wanted
