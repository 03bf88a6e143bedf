"""The prompt contract: rules over requests and raw prompts, and what a request must become before a template sees it.

    value, findings = verify_body(data)                         bytes that should be a JSON request
    findings = verify_request(request, profile, system)         messages, tools, options
    findings = verify_raw(text, profile, system)                a prompt that is already rendered
    prompt = render_request(template, request)                  only after verify_request found no error
    rendered = render_apart(template, messages, tools, controls)
    tokens = tokenize_rendered(rendered, vocabulary, controls)  only the template writes control tokens

A rule is a pure function and a row in one of the tables; its id never changes. docs/prompt-rules.md lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from a3b_gguf.prompt.apart import NotApart, Rendered, render_apart
from a3b_gguf.prompt.findings import Finding, Hit, Rule, Severity, apply, refused
from a3b_gguf.prompt.normalise import normalise, render_request, render_request_apart
from a3b_gguf.prompt.profiles import DEFAULT_PROFILE, PROFILES, Profile, profile_named
from a3b_gguf.prompt.render_rules import Budget, template_finding
from a3b_gguf.prompt.verify import ControlPolicy, verify_body, verify_budget, verify_raw, verify_request
from a3b_gguf.prompt.view import DeveloperPolicy, SystemPolicy

if TYPE_CHECKING:
    from a3b_gguf.prompt.fix import Change, Fixed, fix_request
    from a3b_gguf.prompt.probes import probes_of, profile_of_probes, profile_of_template
    from a3b_gguf.prompt.rules import RULES
    from a3b_gguf.prompt.template_rules import TemplateView
    from a3b_gguf.prompt.token_rules import TokenView, verify_tokens
    from a3b_gguf.prompt.tokenizer_rules import TokenizerView
    from a3b_gguf.prompt.tokens import Border, ControlTokens, TokenizedPrompt, Vocabulary, control_tokens, tokenize_rendered

# What a check of one request does not need is imported when it is asked for.
LATER = {
    "fix": ("Change", "Fixed", "fix_request"),
    "probes": ("probes_of", "profile_of_probes", "profile_of_template"),
    "rules": ("RULES",),
    "template_rules": ("TemplateView",),
    "token_rules": ("TokenView", "verify_tokens"),
    "tokenizer_rules": ("TokenizerView",),
    "tokens": ("Border", "ControlTokens", "TokenizedPrompt", "Vocabulary", "control_tokens", "tokenize_rendered"),
}


def __getattr__(name: str) -> Any:
    for module, names in LATER.items():
        if name in names:
            return getattr(import_module(f"a3b_gguf.prompt.{module}"), name)
    raise AttributeError(name)


__all__ = [
    "DEFAULT_PROFILE",
    "PROFILES",
    "RULES",
    "Border",
    "Budget",
    "Change",
    "ControlPolicy",
    "ControlTokens",
    "DeveloperPolicy",
    "Finding",
    "Fixed",
    "Hit",
    "NotApart",
    "Profile",
    "Rendered",
    "Rule",
    "Severity",
    "SystemPolicy",
    "TemplateView",
    "TokenView",
    "TokenizedPrompt",
    "TokenizerView",
    "Vocabulary",
    "apply",
    "control_tokens",
    "fix_request",
    "normalise",
    "probes_of",
    "profile_named",
    "profile_of_probes",
    "profile_of_template",
    "refused",
    "render_apart",
    "render_request",
    "render_request_apart",
    "template_finding",
    "tokenize_rendered",
    "verify_body",
    "verify_budget",
    "verify_raw",
    "verify_request",
    "verify_tokens",
]
