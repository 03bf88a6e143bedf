"""Small conversations that are rendered with a template, to see what it does. One table; profile and template rules read the outcomes.

llama.cpp does the same in C++ (common/jinja/caps.cpp, common/chat-diff-analyzer.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from a3b_gguf.template import BadTemplate, Template, TemplateRefused

# Marks that no template writes by itself.
SYSTEM, USER, NEXT, ANSWER, RESULT, NAME, VALUE, THOUGHT = (
    "Zsystemz", "Zuserz", "Znextz", "Zanswerz", "Zresultz", "zname", "Zvaluez", "Zthoughtz",
)  # fmt: skip
DEVELOPER, ODD, ROLE = "Zdeveloperz", "Zoddz", "Zrolez"

Message = Mapping[str, Any]
S, U, U2 = ({"role": role, "content": text} for role, text in (("system", SYSTEM), ("user", USER), ("user", NEXT)))
A = {"role": "assistant", "content": ANSWER}
THINKER = {**A, "reasoning_content": THOUGHT}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "d", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}
ARGUMENTS: dict[str, Any] = {"key": VALUE, "flag": True, "none": None}


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": arguments}}


def _calling(arguments: Any, **changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [_call(arguments)], **changes}


T = {"role": "tool", "tool_call_id": "call_1", "content": RESULT}
PARTS = [{"type": "text", "text": USER}, {"type": "text", "text": NEXT}]


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation of the battery."""

    messages: tuple[Message, ...]
    tools: bool = False
    generation: bool = False
    options: Mapping[str, object] = field(default_factory=dict)


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
PRESERVE = {"preserve_thinking": True}
BATTERY: dict[str, Chat] = {
    "user": Chat((U,)),
    "opened": Chat((U,), generation=True),
    "on": Chat((U,), options=ON),
    "off": Chat((U,), options=OFF),
    "opened on": Chat((U,), generation=True, options=ON),
    "opened off": Chat((U,), generation=True, options=OFF),
    "opened word": Chat((U,), generation=True, options={"enable_thinking": "false"}),
    "system": Chat((S, U)),
    "system opened": Chat((S, U), generation=True),
    "system alone": Chat((S,)),
    "late system": Chat((U, S)),
    "two systems": Chat((S, {"role": "system", "content": ODD}, U)),
    "developer": Chat(({"role": "developer", "content": DEVELOPER}, U)),
    "odd role": Chat((U, {"role": ROLE, "content": ODD}, U2)),
    "parts": Chat(({"role": "user", "content": PARTS},)),
    "one part": Chat(({"role": "user", "content": PARTS[:1]},)),
    "no content": Chat((U, _calling({"key": VALUE}, content=None), T), tools=True),
    "turns": Chat((U, A, U2)),
    "call": Chat((S, U, _calling(ARGUMENTS), T), tools=True),
    "call with text": Chat((S, U, _calling(ARGUMENTS, content=ANSWER), T, U2), tools=True),
    "call, tools unsaid": Chat((S, U, _calling(ARGUMENTS, content=ANSWER), T, U2)),
    "call as string": Chat((U, _calling('{"key": "' + VALUE + '"}'), T), tools=True),
    "tools": Chat((S, U), tools=True),
    "tools, no system": Chat((U,), tools=True),
    "tool first": Chat((T, U)),
    "thought": Chat((U, THINKER, U2)),
    "thought kept": Chat((U, THINKER, U2), options=PRESERVE),
    "no thought kept": Chat((U, A, U2), options=PRESERVE),
    "answered off": Chat((U, A, U2), options=OFF),
    "spaces": Chat((S, {"role": "user", "content": f"  {USER} \n"})),
    "wrapped": Chat((U, THINKER, {"role": "user", "content": f"<tool_response>{NEXT}</tool_response>"})),
    **{f"effort {word}": Chat((U,), generation=True, options={"reasoning_effort": word}) for word in ("low", "medium", "high", "xhigh")},
    "effort none such": Chat((U,), generation=True, options={"reasoning_effort": "Zeffortz"}),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """text: the prompt, None when the template did not render. error: its words."""

    text: str | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Probes:
    """What the template did with each conversation of the battery. bad: why it cannot be used at all (sandbox, time), or None."""

    outcomes: Mapping[str, Outcome]
    bad: BadTemplate | None = None

    def text(self, name: str) -> str:
        """The prompt, "" when there is none."""
        return self.outcomes[name].text or ""

    def renders(self, name: str) -> bool:
        return self.outcomes[name].text is not None


def probe(template: Template, names: Iterable[str] = BATTERY) -> Probes:
    """Renders the battery. Stops at the first sign that the template itself is bad: what was not tried counts as refused."""
    outcomes = dict.fromkeys(BATTERY, Outcome(None, "not tried"))
    for name in names:
        chat = BATTERY[name]
        try:
            outcomes[name] = Outcome(template.render(chat.messages, [TOOL] if chat.tools else None, chat.generation, chat.options))
        except TemplateRefused as error:
            outcomes[name] = Outcome(None, error.message)
        except BadTemplate as error:
            return Probes(outcomes, error)
    return Probes(outcomes)
