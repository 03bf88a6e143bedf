"""Conversations made by chance, the same for the same seed: for comparing our renderer with another, and for fuzzing."""

from __future__ import annotations

import random
from typing import Any

TEXTS = (
    "Hi", "Wie heißt <b>Chiles</b> Hauptstadt?", "  leading and trailing \n", "two\n\nparagraphs", "上海今天天气怎么样？",
    "a & b < c > d \"quoted\" 'too'",
    "```python\nprint('x')\n```", "{{ not.a.template }} {% nor this %}", "emoji 👨‍👩‍👧 and é", "tab\there",
    "\\n is not a newline", "x" * 300, "0",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    "Santiago", "", "two\nlines", "03106", 2, -1.5, True, False, None, [1, "a"], [], {"deep": {"er": [None, True]}}, {}, "“quoted”",
)  # fmt: skip
NAMES = ("get_weather", "read", "Bash")
KEYS = ("city", "days", "now", "options")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}, in °C & <mm>.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": f"The {key}.", "enum": ["a", "ü"]} for key in KEYS[: 1 + number]},
                "required": ["city"],
            },
        },
    }
    for number, name in enumerate(NAMES)
]


def conversation(rng: random.Random) -> dict[str, Any]:
    """{"messages", "tools", "chat_template_kwargs"}, such as verify_request finds no error in."""
    tools = rng.sample(TOOLS, rng.randrange(1, 4)) if rng.random() < 0.5 else None
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.7:
        messages.append({"role": "system", "content": rng.choice(TEXTS[:6])})
    for turn in range(rng.randrange(1, 5)):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        if rng.random() < 0.6:
            messages += _round(rng, turn) if tools else [_answer(rng)]
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["enable_thinking"] = rng.random() < 0.5
    if rng.random() < 0.3:
        options["preserve_thinking"] = rng.random() < 0.5
    return {"messages": messages, "tools": tools, "chat_template_kwargs": options}


def _answer(rng: random.Random) -> dict[str, Any]:
    answer = {"role": "assistant", "content": rng.choice(TEXTS)}
    if rng.random() < 0.5:
        answer["reasoning_content"] = rng.choice(TEXTS)
    return answer


def _round(rng: random.Random, turn: int) -> list[dict[str, Any]]:
    """An answer with calls, and their results."""
    answer = _answer(rng)
    answer["content"] = answer["content"] if rng.random() < 0.5 else ""
    calls = []
    for number in range(rng.randrange(1, 4)):
        arguments = {key: rng.choice(VALUES) for key in KEYS[: rng.randrange(0, 5)]}
        function = {"name": rng.choice(NAMES), "arguments": arguments}
        calls.append({"id": f"call_{turn}_{number}", "type": "function", "function": function})
    answer["tool_calls"] = calls
    return [answer, *({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(TEXTS)} for call in calls)]


def conversations(seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [conversation(rng) for _ in range(count)]
