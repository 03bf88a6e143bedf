"""R025: a prompt is taken apart and rendered anew by the model's template. What comes out must be what went in, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.raw_parse import OPTIONS, Parsed, parse_raw
from a3b_gguf.prompt.raw_view import RawView
from a3b_gguf.prompt.view import shown
from a3b_gguf.template import BadTemplate, Template, TemplateRefused


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """view: a prompt in which no other rule found an error."""

    view: RawView
    template: Template


def renders_the_same(trip: RoundTrip) -> Iterator[Hit]:
    text = trip.view.text
    best, refusal = -1, ""
    parsed = parse_raw(trip.view, trip.template)
    if parsed is None:
        yield Hit(
            "byte 0, line 1",
            "the prompt cannot be taken apart, so that it is not known whether the template would write it",
            "",
            "warning",
            0,
        )
        return
    for candidate in rendered(parsed, trip.template):
        if parsed.opaque and isinstance(candidate, str):
            candidate = text[: trip.view.turns[0].after] + "\n" + candidate
        if isinstance(candidate, str):
            same = _common(candidate, text)
            if same == len(candidate) and (same == len(text) or parsed.opened):
                return
            best = max(best, same)
        else:
            refusal = candidate.message
    if best < 0:
        yield Hit("byte 0, line 1", f"the template would not write such a prompt: {refusal}", offset=0)
        return
    where, offset = trip.view.place(best)
    yield Hit(where, f"from {shown(text[best : best + 30])} on the template would write something else", offset=offset)


def rendered(parsed: Parsed, template: Template) -> Iterator[str | TemplateRefused]:
    """The prompt under every combination of options that could have made it."""
    tools: list[Any] | None = list(parsed.tools) or None
    messages = list(parsed.messages)
    for options in OPTIONS:
        try:
            yield template.render(messages, tools, parsed.opened, options)
        except TemplateRefused as error:
            yield error
        except BadTemplate as error:
            yield TemplateRefused(error.message)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


ROUND_TRIP_RULES: tuple[Rule[RoundTrip], ...] = (
    Rule(
        "R025",
        "error",
        "The template writes this very prompt for the messages in it; one that cannot be taken apart is a warning (checked where a "
        "template is at hand, when no other rule found an error).",
        "render the messages with the model's template (a3b verify-prompt --render)",
        renders_the_same,
    ),
)
