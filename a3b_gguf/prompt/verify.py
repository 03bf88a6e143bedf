"""The tables of rules, and the three doors: bytes, a request, a rendered prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from a3b_gguf.prompt.body_rules import BODY_RULES, read_body
from a3b_gguf.prompt.control_rules import CONTROL_RULES
from a3b_gguf.prompt.findings import Finding, Rule, apply, refused
from a3b_gguf.prompt.message_rules import CHARACTER_RULES, CONTENT_RULES, SHAPE_RULES
from a3b_gguf.prompt.order_rules import ORDER_RULES, SYSTEM_RULES
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.prompt.raw_rules import RAW_RULES
from a3b_gguf.prompt.raw_view import view_raw
from a3b_gguf.prompt.render_rules import RENDER_RULES
from a3b_gguf.prompt.tool_rules import OPTION_RULES, TOOL_RULES
from a3b_gguf.prompt.view import SystemPolicy, view_request
from a3b_gguf.template import ChatTemplate

REQUEST_RULES = (
    *CHARACTER_RULES, *SHAPE_RULES, *SYSTEM_RULES, *ORDER_RULES, *CONTENT_RULES, *CONTROL_RULES, *TOOL_RULES, *OPTION_RULES,
)  # fmt: skip
RULES: tuple[Rule[Any], ...] = (*BODY_RULES, *REQUEST_RULES, *RENDER_RULES, *RAW_RULES)


def verify_body(data: bytes) -> tuple[Any, list[Finding]]:
    """The JSON value of `data`, and what is wrong with its bytes. Never raises; the value is None when an error is among the findings."""
    body = read_body(data)
    findings = list(apply(BODY_RULES, body))
    return (None if refused(findings) else body.value), findings


def verify_request(
    request: Mapping[str, Any], profile: Profile, system: SystemPolicy = "optional", template: ChatTemplate | None = None
) -> list[Finding]:
    """What is wrong with {"messages": [...], "tools": [...], "chat_template_kwargs": {...}}; other keys are not looked at. Never raises
    over any JSON value.

    With `template`, a request without errors is also rendered once, and the template's own refusal is a finding.
    """
    view = view_request(request, profile, system, template)
    findings = list(apply(REQUEST_RULES, view))
    return findings if refused(findings) else [*findings, *apply(RENDER_RULES, view)]


def verify_raw(text: str, profile: Profile, system: SystemPolicy = "optional") -> list[Finding]:
    """What is wrong with a rendered prompt, by place. Raises BadInput when the profile does not write ChatML turns."""
    return sorted(apply(RAW_RULES, view_raw(text, profile, system)), key=lambda finding: finding.offset or 0)
