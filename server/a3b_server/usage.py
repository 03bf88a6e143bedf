"""What a request cost, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. n_cached: of the prompt, that were not read again; None when nothing was drawn."""

    n_prompt: int
    n_generated: int
    n_cached: int | None = None
    n_reasoning: int = 0

    def body(self) -> dict[str, Any]:
        cached = {} if self.n_cached is None else {"prompt_tokens_details": {"cached_tokens": self.n_cached}}
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
            **cached,
            "completion_tokens_details": {"reasoning_tokens": self.n_reasoning},
        }


def sum_of(choices: Sequence[Usage], n_each: int = 1) -> Usage:
    """Of several choices, `n_each` of every prompt: a prompt counts once, and was cached as far as its first choice found it so."""
    firsts = choices[::n_each]
    known = [usage.n_cached for usage in firsts if usage.n_cached is not None]
    return Usage(
        sum(usage.n_prompt for usage in firsts),
        sum(usage.n_generated for usage in choices),
        sum(known) if len(known) == len(firsts) else None,
        sum(usage.n_reasoning for usage in choices),
    )
