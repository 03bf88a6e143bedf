"""The last rule: the model's own template accepts the request. It needs the template, and a request without errors."""

from __future__ import annotations

from collections.abc import Iterator

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.normalise import render_request
from a3b_gguf.prompt.view import RequestView
from a3b_gguf.template import BadTemplate, TemplateRefused


def template_accepts(view: RequestView) -> Iterator[Hit]:
    if view.template is None:
        return
    try:
        render_request(view.template, view.request)
    except (TemplateRefused, BadTemplate) as error:
        yield Hit("messages", error.message, error.hint)


RENDER_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M099",
        "error",
        "The model's own template accepts the request (checked with `--model`, when no other rule found an error).",
        "change the messages as the template says",
        template_accepts,
    ),
)
