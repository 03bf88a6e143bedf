"""A profile found by rendering small conversations, so that a patched template is judged by what it does, not by its name.

llama.cpp does the same in C++ (common/jinja/caps.cpp, common/chat-diff-analyzer.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from a3b_gguf.prompt.profiles import CallStyle, Profile
from a3b_gguf.template import NO_OPTIONS, BadTemplate, ChatTemplate, TemplateRefused

# Marks that no template writes by itself.
SYSTEM, USER, NAME, VALUE = "Zsystemz", "Zuserz", "zname", "Zvaluez"
ASK: Sequence[Mapping[str, Any]] = ({"role": "user", "content": USER},)
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "d", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": {"key": VALUE}}}


def profile_of_template(template: ChatTemplate, name: str, controls: tuple[str, ...]) -> Profile:
    """How `template` speaks to its model. controls: the vocabulary's own. Raises BadTemplate when it cannot render even a question."""
    question = _render(template, ASK)
    if question is None or USER not in question:
        raise BadTemplate(
            f"the chat template of {name} does not render a user message", "convert the model again with the template of its checkpoint"
        )
    start, end = _turn_marks(template)
    on, off = (_generation(template, {"enable_thinking": thinking}) for thinking in (True, False))
    return Profile(
        name=name,
        generation_on=on,
        generation_off=off,
        controls=controls,
        turn_start=start,
        turn_end=end,
        strict_system=_render(template, (*ASK, {"role": "system", "content": SYSTEM})) is None,
        list_content=_render(template, ({"role": "user", "content": [{"type": "text", "text": USER}]},)) == question,
        call_style=_call_style(template),
    )


def _render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation: bool = False,
    options: Mapping[str, object] = NO_OPTIONS,
) -> str | None:
    """The prompt, or None when the template refuses."""
    try:
        return template.render(messages, tools, generation, options)
    except TemplateRefused:
        return None


def _turn_marks(template: ChatTemplate) -> tuple[str, str]:
    """The strings around a turn when two of them are written as ChatML writes them, else two empty strings."""
    two = (
        _render(template, ({"role": "user", "content": USER}, {"role": "assistant", "content": "a"}, {"role": "user", "content": VALUE}))
        or ""
    )
    start, end = "<|im_start|>", "<|im_end|>"
    chatml = f"{start}user\n{USER}{end}\n{start}assistant\n" in two and two.endswith(f"{end}\n{start}user\n{VALUE}{end}\n")
    return (start, end) if chatml else ("", "")


def _generation(template: ChatTemplate, options: Mapping[str, object]) -> str:
    """What the template appends when it is asked to open the answer."""
    without, with_it = _render(template, ASK, options=options) or "", _render(template, ASK, generation=True, options=options) or ""
    return with_it.removeprefix(without) if with_it.startswith(without) else ""


def _call_style(template: ChatTemplate) -> CallStyle:
    messages = (
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    )
    text = _render(template, messages, [TOOL]) or ""
    if f"<function={NAME}>" in text and VALUE in text:
        return "xml"
    return "json" if f'"name": "{NAME}"' in text and VALUE in text else "none"
