"""Renders a request so that it stays known which part of the prompt the request wrote and which the template wrote.

A prompt is one string, and tokenizing it whole turns `<|im_end|>` into the control token whoever wrote it. llama.cpp marks the parts in its
own template engine but joins them before it tokenizes (common/chat.cpp at 0c1e57098), and Hugging Face does the same. Here:

1. The request is rendered as it is: this text is the prompt.
2. Its strings are searched for anything that could be a control text of that prompt, or a part of one that the template completes.
   Nearly always there is none, and the prompt can be tokenized whole.
3. Else it is rendered once more with those strings between two characters that occur nowhere in it. Without them the text must be the
   same, byte for byte; they say where the strings ended up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.prompt.view import any_of, strings
from a3b_gguf.template import NO_OPTIONS, Template, TemplateRefused

THINK_TAG = re.compile(r"(</?think>)")
FIRST_PRIVATE, LAST_PRIVATE = 0xE000, 0xF8FF
ROLE = "role"  # of a message: a word that templates compare; it is one of four when the request was verified


@dataclass(frozen=True, slots=True)
class Rendered:
    """text: the prompt. foreign: characters [start, stop) that a string of the request wrote and that look like a control text or touch it;
    they must stay text. Whatever is not in `foreign` can be tokenized as it stands."""

    text: str
    foreign: tuple[tuple[int, int], ...] = ()


class NotApart(BadInput):
    """The template changes what it prints when the request's strings are marked, so that their place cannot be proved."""


def render_apart(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    controls: tuple[str, ...],
    options: Mapping[str, object] = NO_OPTIONS,
    continue_final: bool = False,
) -> Rendered:
    """The prompt of normalised `messages`, ending with the opener of the answer. controls: the texts of the vocabulary's control tokens.

    continue_final: the last message is the assistant's and the model goes on with its text. Renders once, or twice when a string of the
    request could be taken for a control token. Raises TemplateRefused in the template's words; NotApart when such a string cannot be
    followed through the template, which is the case for a template that looks at how a text begins.
    """
    text = template.render(messages, tools, not continue_final, options)
    flagged = _flagged(messages, tools, _occurring(text, controls))
    rendered = Rendered(text, _places(template, (messages, tools, options, continue_final), text, flagged) if flagged else ())
    return _cut(rendered, str(messages[-1].get("content") or "").strip()) if continue_final else rendered


def _occurring(text: str, controls: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(control for control in controls if control in text)


def _flagged(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, controls: tuple[str, ...]) -> frozenset[str]:
    """The strings that hold one of `controls`, or that are or touch a part of one."""
    pattern = any_of(controls)
    if pattern is None:
        return frozenset()
    heads = tuple({control[:n] for control in controls for n in range(1, len(control))})
    tails = tuple({control[n:] for control in controls for n in range(1, len(control))})
    inner = "\0".join(controls)

    def looks_foreign(text: str) -> bool:
        stripped = text.strip()
        if not stripped:
            return False
        return stripped in inner or stripped.endswith(heads) or stripped.startswith(tails) or pattern.search(text) is not None

    values = [tools, *(value for message in messages for key, value in message.items() if key != ROLE)]
    return frozenset(text for value in values for _, text in strings(value, "$") if looks_foreign(text))


def _places(
    template: Template, given: tuple[Any, Any, Mapping[str, object], bool], text: str, flagged: frozenset[str]
) -> tuple[tuple[int, int], ...]:
    messages, tools, options, continue_final = given
    used = set(text).union(*flagged) | set(template.text)
    free = (chr(code) for code in range(FIRST_PRIVATE, LAST_PRIVATE) if chr(code) not in used)
    try:
        first, last = next(free), next(free)
    except StopIteration:
        raise NotApart("the text uses every private character", "leave some out") from None
    marked = _Marker(flagged, first, last)
    try:
        found = template.render([marked.message(message) for message in messages], marked.value(tools), not continue_final, options)
    except TemplateRefused as error:
        raise NotApart(f"{_named(flagged)} cannot be told from the template's own text: {error.message}", FIX) from error
    if found.replace(first, "").replace(last, "") != text:
        raise NotApart(f"{_named(flagged)} changes what the template writes, so that it cannot be told from the template's own text", FIX)
    return tuple(_between(found, first, last))


FIX = "break it up, such as '< |im_end|>', or leave it out"


def _named(flagged: frozenset[str]) -> str:
    longest = max(flagged, key=len)
    return repr(longest if len(longest) <= 40 else longest[:40] + "…")


def _between(found: str, first: str, last: str) -> Iterator[tuple[int, int]]:
    """Where the marked strings stand once the marks are taken out."""
    n_marks, start = 0, None
    for match in re.finditer(f"[{first}{last}]", found):
        at = match.start() - n_marks
        n_marks += 1
        if (match[0] == first) != (start is None):
            raise NotApart("the template cuts a text of the request at a place of its own", FIX)
        if match[0] == first:
            start = at
        elif start is not None:
            yield start, at
            start = None
    if start is not None:
        raise NotApart("the template cuts the end of a text of the request", FIX)


@dataclass(frozen=True, slots=True)
class _Marker:
    """Puts marks around the flagged strings, inside their outer whitespace, which templates trim."""

    flagged: frozenset[str]
    first: str
    last: str

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: value if key == ROLE else self.value(value) for key, value in message.items()}
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str) and content in self.flagged:
            # Templates split an answer at its think tags; the tags are then the template's again.
            found["content"] = "".join(piece if THINK_TAG.fullmatch(piece) else self.mark(piece) for piece in THINK_TAG.split(content))
        return found

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.mark(value) if value in self.flagged else value
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, Mapping):
            return {self.mark(key) if key in self.flagged else key: self.value(item) for key, item in value.items()}
        return value

    def mark(self, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        return f"{text[:at]}{self.first}{core}{self.last}{text[at + len(core) :]}"


def _cut(rendered: Rendered, last_text: str) -> Rendered:
    """The prompt up to the end of the last message's text, which stays open."""
    end = rendered.text.rfind(last_text) + len(last_text) if last_text else -1
    if end < len(last_text) or not last_text:
        raise TemplateRefused("the last message cannot be continued: the template does not show its text", "give it text, or leave it out")
    return Rendered(rendered.text[:end], tuple((start, min(stop, end)) for start, stop in rendered.foreign if start < end))
