"""Three points a question: D, the right tools or rightly none; A, the right arguments; P, the protocol kept. No half points.

D = 0 makes A = 0. Where no call is right, A means that there are no arguments anywhere and P that the content is clean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.toolbench.question import Expected, Message, Question, Step

MARKUP = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "<think>", "</think>", "<|im_start|>", "<|im_end|>")
CALL_MARKUP = MARKUP[:5]
Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of an endpoint: the assistant's message and the reason why it ended."""

    message: Message
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """decision, arguments, protocol: a point or none each. faults: why one is missing; wrote_markup: calls came as text."""

    decision: bool
    arguments: bool
    protocol: bool
    faults: tuple[str, ...] = ()
    wrote_markup: bool = False

    @property
    def points(self) -> int:
        return self.decision + self.arguments + self.protocol


def score(question: Question, replies: Sequence[Reply]) -> Score:
    """The points of what was answered to `question`, one reply for each step that was reached."""
    steps = played(question.steps, replies)
    decisions, arguments, protocol = [], [], []
    for step, reply in zip(steps, replies, strict=False):
        decisions += decision_faults(step, reply)
        arguments += argument_faults(step, reply)
        protocol += protocol_faults(step, reply, question.quotes)
    if len(replies) < len(steps):
        decisions.append(f"ended after {len(replies)} of {len(steps)} steps")
    texts = " ".join(str(reply.message.get("content") or "") for reply in replies)
    return Score(
        decision=not decisions,
        arguments=not decisions and not arguments,
        protocol=not protocol,
        faults=tuple([*decisions, *arguments, *protocol]),
        wrote_markup=not question.quotes and any(mark in texts for mark in CALL_MARKUP),
    )


def played(steps: Sequence[Step], replies: Sequence[Reply]) -> list[Step]:
    """The steps that the replies are measured by: an optional one is left out where the reply beside it has no call."""
    taken: list[Step] = []
    for step in steps:
        at = len(taken)
        if step.optional and at < len(replies) and not calls_of(replies[at]):
            continue
        taken.append(step)
    return taken


def calls_of(reply: Reply) -> list[Mapping[str, Any]]:
    """Names and parsed arguments of the calls; arguments that are no JSON object are None."""
    found: list[Mapping[str, Any]] = []
    for call in reply.message.get("tool_calls") or []:
        function = call.get("function") or {}
        try:
            arguments = json.loads(function["arguments"])
        except (KeyError, TypeError, ValueError):
            arguments = None
        found.append({"name": function.get("name"), "arguments": arguments if isinstance(arguments, dict) else None})
    return found


def decision_faults(step: Step, reply: Reply) -> list[str]:
    called, wanted = sorted(str(call["name"]) for call in calls_of(reply)), sorted(call.name for call in step.calls)
    if called == wanted:
        return []
    return [f"called {', '.join(called) or 'nothing'}, expected {', '.join(wanted) or 'no call'}"]


def argument_faults(step: Step, reply: Reply) -> list[str]:
    """What differs from the expected arguments; calls of one tool may come in any order."""
    left = calls_of(reply)
    faults = []
    for wanted in step.calls:
        fitting = next((call for call in left if call["name"] == wanted.name and fits(call["arguments"], wanted)), None)
        if fitting is not None:
            left.remove(fitting)
        else:
            got = next((call["arguments"] for call in left if call["name"] == wanted.name), "no such call")
            faults.append(f"{wanted.name}: expected {short(wanted.arguments)}, got {short(got)}")
    return faults


def fits(arguments: Any, wanted: Expected) -> bool:
    if not isinstance(arguments, dict) or arguments.keys() != wanted.arguments.keys():
        return False
    return all(is_value(arguments[key], value) for key, value in wanted.arguments.items())


def is_value(found: Any, wanted: Any) -> bool:
    """Equal with the same JSON type (1 and 1.0 are one number, True is none), or one of an {"any": [...]}."""
    if isinstance(wanted, Mapping) and wanted.keys() == {"any"}:
        return any(is_value(plain(found), plain(one)) for one in wanted["any"])
    if wanted == "null()":  # TOML has no null
        return found is None
    if isinstance(wanted, Mapping):
        return isinstance(found, dict) and found.keys() == wanted.keys() and all(is_value(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(is_value, found, wanted))
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


def plain(value: Any) -> Any:
    return " ".join(value.casefold().split()) if isinstance(value, str) else value


def protocol_faults(step: Step, reply: Reply, quotes: bool) -> list[str]:
    message, calls = reply.message, reply.message.get("tool_calls") or []
    content = str(message.get("content") or "")
    faults = [] if quotes else [f"{mark} in the content" for mark in MARKUP if mark in content]
    ids = [call.get("id") for call in calls]
    if len(set(ids)) < len(ids) or not all(isinstance(one, str) and one for one in ids):
        faults.append("calls without an id of their own")
    for call in calls:
        text = (call.get("function") or {}).get("arguments")
        if call.get("type") != "function" or not isinstance(text, str) or "\n" in text.strip():
            faults.append("arguments that are not one line of JSON text")
    expected = "tool_calls" if calls else "stop"
    if reply.finish_reason != expected:
        faults.append(f"finish_reason is {reply.finish_reason}, expected {expected}")
    if not step.calls and not calls:
        if not content.strip():
            faults.append("the content is empty")
        elif step.answer and not any(text.casefold() in content.casefold() for text in step.answer):
            faults.append(f"the answer holds none of {', '.join(map(repr, step.answer))}")
        faults += [f"the answer holds {text!r}" for text in step.never if text.casefold() in content.casefold()]
    return faults


def short(value: Any, most: int = 120) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 3] + "..."


def wilson(points: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson, JASA 22 (1927): 69 of 72 is 0.885 to 0.986."""
    if not of:
        return 0.0, 1.0
    share, z2 = points / of, Z95**2
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of**2)) / (1 + z2 / of)
    return max(0.0, middle - half), min(1.0, middle + half)
