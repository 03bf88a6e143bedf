"""Findings of the prompt rules as an answer: errors refuse a request, in strict mode warnings do too, and what remains is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from a3b_gguf.prompt import Finding
from a3b_server.errors import APIError
from a3b_server.service import Mode


def refuse_errors(findings: Sequence[Finding], mode: Mode = "lenient") -> None:
    """Raises APIError 400 for the first finding that refuses; the answer lists every finding."""
    refusing = ("error", "warning") if mode == "strict" else ("error",)
    first = next((finding for severity in refusing for finding in findings if finding.severity == severity), None)
    if first is not None:
        more = {"rule": first.rule, "fix": first.fix, "findings": told(findings)}
        param = first.where if " " not in first.where else None  # "byte 17, line 3" is a place, not a field
        raise APIError(400, f"{first.rule}: {first.where}: {first.message}; {first.fix}", "prompt_refused", param, more)


def told(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in findings]


def worth_telling(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Warnings: notes say what is normal."""
    return tuple(finding for finding in findings if finding.severity == "warning")
