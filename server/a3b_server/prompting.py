"""From a chat request to the tokens that the engine gets: checked, normalised, rendered, tokenized. Refuses, never repairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from a3b_server.schema import ChatRequest, check_chat
from a3b_server.service import Service

# Tokens of an answer when a request sets no limit. They are reserved while it runs, so a larger number lets fewer run at once.
DEFAULT_MAX_TOKENS = 4096
MAPPED_DEVELOPER = "M024"  # says what --map-developer does, and is no reason to refuse
CLOSE_REASONING = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as tokens. in_thinking: the model goes on inside an open think block, so that its output starts as reasoning.

    findings: warnings of the rules, for the answer. warnings: what of the request was left out.
    """

    rendered: Rendered
    tokenized: TokenizedPrompt
    in_thinking: bool
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()


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
    prompt = prompt_of(parsed, service)
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


def prompt_of(parsed: Parsed[ChatRequest], service: Service) -> Prompt:
    """Checks, renders once, and tokenizes so that no text of the request becomes a control token. Raises APIError 400 with the rule."""
    request, options = parsed.request, service.options
    findings = verify_request(parsed.body, service.profile, options.system, controls=options.controls, developer=options.developer)
    mapped = [finding for finding in findings if not (finding.rule == MAPPED_DEVELOPER and options.developer == "system")]
    refuse_errors(mapped, options.mode)
    messages = normalise(request.messages, options.developer)
    template_options, left_out = _template_options(request, service)
    continues = request.continue_final_message is True
    if request.add_generation_prompt is False and not continues:
        message = "add_generation_prompt: a prompt without one is not served; leave it out, or send continue_final_message"
        _leave_out("add_generation_prompt", APIError(400, message, "unsupported_parameter", "add_generation_prompt"), left_out, service)
    tools = list(request.tools or ()) if request.tool_choice != "none" else []
    try:
        rendered = render_apart(service.template, messages, tools or None, service.profile.controls, template_options, continues)
        tokenized = tokenize_rendered(rendered, service.vocab, service.controls, service.profile.turn_starts)
    except (TemplateRefused, NotApart) as error:
        refuse_errors([*findings, template_finding(error)])
        raise
    except BadInput as error:
        raise APIError(400, error.message, "invalid_prompt", "messages") from error
    return Prompt(rendered, tokenized, ends_in_thinking(rendered.text), worth_telling(findings), tuple(left_out))


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


def _leave_out(name: str, error: APIError, left_out: list[str], service: Service) -> None:
    """Notes what is not served, where the server leaves such things out; else raises the error that says so."""
    if service.options.unknown == "refuse":
        raise error
    left_out.append(f"{name} is not served")


def _template_options(request: ChatRequest, service: Service) -> tuple[dict[str, object], list[str]]:
    """Variables for the template, and what was left out. A request's own words stand above the server's; two different ones in a
    request are refused.
    """
    options, left_out = dict(request.chat_template_kwargs or {}), list[str]()
    for name in [name for name in options if name != "enable_thinking" and name not in service.template.variables]:
        known = ", ".join(sorted(service.template.variables))
        message = f"the model's template does not read {name!r}; it reads {known}"
        error = APIError(400, message, "unknown_parameter", "chat_template_kwargs")
        _leave_out(f"chat_template_kwargs.{name}", error, left_out, service)
        del options[name]
    said = [value for value in (request.enable_thinking, options.pop("enable_thinking", None)) if value is not None]
    if request.reasoning_effort == "none":
        said.append(False)
    elif request.reasoning_effort in service.profile.efforts:
        options["reasoning_effort"] = request.reasoning_effort
    elif request.reasoning_effort is not None:
        _leave_out("reasoning_effort", _no_such_effort(request.reasoning_effort, service), left_out, service)
    if not all(isinstance(value, bool) for value in said):
        raise APIError(400, "enable_thinking must be true or false", "invalid_value", "chat_template_kwargs")
    if len(set(said)) > 1:
        raise APIError(400, "the request says both that the model shall think and that it shall not", "invalid_value", "enable_thinking")
    if said or service.options.thinking != "auto":
        options["enable_thinking"] = said[0] if said else service.options.thinking == "on"
    if options.get("enable_thinking") and said and not service.profile.thinks:
        raise APIError(400, f"{service.model} cannot think: its template has no think block", "unsupported_parameter", "enable_thinking")
    return options, left_out


def _no_such_effort(wanted: str, service: Service) -> APIError:
    known = service.profile.efforts
    takes = f"it takes none, {', '.join(known)}" if known else "leave it out or send none"
    message = f"reasoning_effort: {wanted[:40]!r} is not served by {service.model}; {takes}"
    return APIError(400, message, "unsupported_parameter", "reasoning_effort")
