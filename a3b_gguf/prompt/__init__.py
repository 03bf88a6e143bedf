"""The prompt contract: rules over requests and raw prompts, and what a request must become before a template sees it.

    value, findings = verify_body(data)                         bytes that should be a JSON request
    findings = verify_request(request, profile, system)         messages, tools, options
    findings = verify_raw(text, profile, system)                a prompt that is already rendered
    prompt = render_request(template, request)                  only after verify_request found no error

A rule is a pure function and a row in one of the tables; its id never changes. docs/prompt-rules.md lists them.
"""

from a3b_gguf.prompt.findings import Finding, Hit, Rule, Severity, apply, refused
from a3b_gguf.prompt.normalise import normalise, render_request
from a3b_gguf.prompt.probes import profile_of_template
from a3b_gguf.prompt.profiles import DEFAULT_PROFILE, PROFILES, Profile, profile_named
from a3b_gguf.prompt.verify import RULES, verify_body, verify_raw, verify_request
from a3b_gguf.prompt.view import SystemPolicy

__all__ = [
    "DEFAULT_PROFILE",
    "PROFILES",
    "RULES",
    "Finding",
    "Hit",
    "Profile",
    "Rule",
    "Severity",
    "SystemPolicy",
    "apply",
    "normalise",
    "profile_named",
    "profile_of_template",
    "refused",
    "render_request",
    "verify_body",
    "verify_raw",
    "verify_request",
]
