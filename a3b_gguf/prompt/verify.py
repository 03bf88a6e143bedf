"""The doors: bytes, a request, a rendered prompt. Tokens have theirs in `token_rules`, templates and tokenizers in `flows.prompt_lint`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from a3b_gguf.prompt.body_rules import BODY_RULES, read_body
from a3b_gguf.prompt.call_rules import CALL_RULES
from a3b_gguf.prompt.character_rules import CHARACTER_RULES
from a3b_gguf.prompt.control_rules import CONTROL_RULES, KEPT_AS_TEXT
from a3b_gguf.prompt.findings import Finding, apply, refused
from a3b_gguf.prompt.message_rules import CONTENT_RULES, SHAPE_RULES
from a3b_gguf.prompt.option_rules import OPTION_RULES
from a3b_gguf.prompt.order_rules import ORDER_RULES
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.prompt.render_rules import RAW_BUDGET, RENDER_RULES, REQUEST_BUDGET, Budget
from a3b_gguf.prompt.system_rules import SYSTEM_RULES
from a3b_gguf.prompt.tool_rules import TOOL_RULES
from a3b_gguf.prompt.view import DeveloperPolicy, SystemPolicy, view_request
from a3b_gguf.template import Template

ControlPolicy = Literal["refuse", "as-text"]

REQUEST_RULES = (
    *CHARACTER_RULES, *SHAPE_RULES, *SYSTEM_RULES, *ORDER_RULES, *CONTENT_RULES, *CONTROL_RULES, *TOOL_RULES, *CALL_RULES, *OPTION_RULES,
)  # fmt: skip


def verify_body(data: bytes) -> tuple[Any, list[Finding]]:
    """The JSON value of `data`, and what is wrong with its bytes. Never raises; the value is None when an error is among the findings."""
    body = read_body(data)
    findings = list(apply(BODY_RULES, body))
    return (None if refused(findings) else body.value), findings


def verify_request(
    request: Mapping[str, Any],
    profile: Profile,
    system: SystemPolicy = "optional",
    template: Template | None = None,
    controls: ControlPolicy = "refuse",
    developer: DeveloperPolicy = "refuse",
    complete: bool = False,
) -> list[Finding]:
    """What is wrong with {"messages": [...], "tools": [...], "chat_template_kwargs": {...}}; other keys are not looked at. Never raises
    over any JSON value.

    With `template`, a request without errors is also rendered once, and the template's own refusal is a finding. controls: "as-text" for a
    caller that tokenizes with `tokenize_rendered`, where control texts in content cannot do harm: they are notes then. developer: "system"
    for one that normalises with it. complete: for conversations that end with their answer, as data sets hold them.
    """
    view = view_request(request, profile, system, template, developer, complete)
    findings = list(apply(REQUEST_RULES, view))
    if controls == "as-text":
        findings = [_noted(finding) if finding.rule in KEPT_AS_TEXT else finding for finding in findings]
    return findings if refused(findings) else [*findings, *apply(RENDER_RULES, view)]


def _noted(finding: Finding) -> Finding:
    return dataclasses.replace(finding, severity="note", message=f"{finding.message}; it is kept as text")


def verify_raw(
    text: str, profile: Profile, system: SystemPolicy = "optional", template: Template | None = None, complete: bool = False
) -> list[Finding]:
    """What is wrong with a rendered prompt, by place. Raises BadInput when the profile writes turns of a form that is not known here.

    With `template`, a prompt without errors is also taken apart, rendered anew and compared (R025).
    """
    from a3b_gguf.prompt.raw_rules import RAW_RULES
    from a3b_gguf.prompt.raw_text_rules import RAW_TEXT_RULES
    from a3b_gguf.prompt.raw_view import view_raw
    from a3b_gguf.prompt.round_trip import ROUND_TRIP_RULES, RoundTrip

    view = view_raw(text, profile, system, complete)
    findings = [*apply(RAW_RULES, view), *apply(RAW_TEXT_RULES, view)]
    if template is not None and not refused(findings):
        findings += apply(ROUND_TRIP_RULES, RoundTrip(view, template))
    return sorted(findings, key=lambda finding: finding.offset or 0)


def verify_budget(budget: Budget, raw: bool = False) -> list[Finding]:
    """Whether a prompt's tokens fit (M059, R024)."""
    return list(apply(RAW_BUDGET if raw else REQUEST_BUDGET, budget))
