"""The last rules: the model's own template accepts the request, and its tokens fit. They need a request without errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from a3b_gguf.errors import A3BError
from a3b_gguf.prompt.apart import NotApart
from a3b_gguf.prompt.findings import Finding, Hit, Rule
from a3b_gguf.prompt.normalise import render_request_apart
from a3b_gguf.prompt.view import RequestView
from a3b_gguf.template import BadTemplate, TemplateRefused


@dataclass(frozen=True, slots=True)
class Budget:
    """n_tokens: of the prompt. reserve: tokens that the answer may take."""

    n_tokens: int
    n_ctx: int
    reserve: int = 0


def template_accepts(view: RequestView) -> Iterator[Hit]:
    if view.template is None:
        return
    try:
        render_request_apart(view.template, view.request, view.profile.controls, view.developer)
    except (TemplateRefused, BadTemplate) as error:
        yield Hit("messages", error.message, error.hint)


def template_finding(error: A3BError) -> Finding:
    """What a refusal of `render_apart` is as a finding, for a caller that renders by itself."""
    rule = next(rule for rule in RENDER_RULES if rule.id == "M099")
    if isinstance(error, NotApart):
        return Finding("M055", "error", "messages", error.message, error.hint)
    return Finding(rule.id, rule.severity, "messages", error.message, error.hint or rule.fix)


def fits(budget: Budget) -> Iterator[Hit]:
    if budget.n_tokens + budget.reserve > budget.n_ctx:
        answer = f" and {budget.reserve:,} for the answer" if budget.reserve else ""
        yield Hit("the prompt", f"{budget.n_tokens:,} tokens{answer} are more than the {budget.n_ctx:,} of the context")


RENDER_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M099",
        "error",
        "The model's own template accepts the request (checked with `--model`, when no other rule found an error).",
        "change the messages as the template says",
        template_accepts,
    ),
)
TRIM = "shorten the conversation, or give it a larger context"
REQUEST_BUDGET: tuple[Rule[Budget], ...] = (
    Rule("M059", "error", "The prompt and its answer fit into the context (checked with `--model` and `--ctx`).", TRIM, fits),
)
RAW_BUDGET: tuple[Rule[Budget], ...] = (
    Rule("R024", "error", "The prompt and its answer fit into the context (checked with `--model` and `--ctx`).", TRIM, fits),
)
