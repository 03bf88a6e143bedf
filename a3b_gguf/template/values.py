"""What both kinds of template share: the names that are the renderer's own, the limits, the two ways to fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from a3b_gguf.errors import AnswerIsNo, BadInput

# What the renderer itself hands to a template; a request's options may not replace any of it.
RESERVED = frozenset((
    "messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now", "range", "dict", "namespace",
))  # fmt: skip
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
MAX_TEMPLATE_CHARS = 256 << 10
THINK, END_THINK = "<think>", "</think>"
TURN_START = "<|im_start|>"
FIX_TEMPLATE = "do not use this file's template: convert the model again from a source that you trust"


class BadTemplate(BadInput):
    """The template itself is wrong: its syntax, or it reaches for what the sandbox forbids, or it takes too long."""


class TemplateRefused(AnswerIsNo):
    """The template will not render these messages. The message holds the template's own words: a server answers 400."""


class Template(Protocol):
    """What rules and server ask of a chat template. `variables`: names that it reads and does not set itself."""

    text: str
    variables: frozenset[str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> str: ...


def ends_in_thinking(prompt: str) -> bool:
    """Whether the model goes on inside an open `<think>` after this prompt, so that its output starts as reasoning."""
    turn = prompt[max(prompt.rfind(TURN_START), 0) :]
    return turn.rfind(THINK) > turn.rfind(END_THINK)
