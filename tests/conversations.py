"""Messages and rendered prompts that tests of the prompt rules are made of."""

from __future__ import annotations

from typing import Any

from a3b_gguf.prompt import PROFILES, Finding
from a3b_gguf.template import ChatTemplate

QWEN36, QWEN3 = PROFILES["qwen3.6"], PROFILES["qwen3"]
S = {"role": "system", "content": "You are brief."}
U = {"role": "user", "content": "Hi"}
A = {"role": "assistant", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
C = {"role": "assistant", "content": None, "tool_calls": [CALL]}
T = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
FUNCTION: dict[str, Any] = {"name": "get_weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}

# A template that refuses a word, in words of its own.
PICKY = ChatTemplate("{% if 'never' in messages[-1].content %}{{ raise_exception('Not that word.') }}{% endif %}{{ messages[-1].content }}")


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def calls(*found: Any) -> dict[str, Any]:
    return chat(S, U, {"role": "assistant", "content": "", "tool_calls": list(found)}, T)


def arguments(value: Any) -> dict[str, Any]:
    return calls({**CALL, "function": {"name": "f", "arguments": value}})


def function(**changes: Any) -> dict[str, Any]:
    return chat(S, U, tools=[{"type": "function", "function": {**FUNCTION, **changes}}])


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


SYSTEM_TURN, USER_TURN = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nHi<|im_end|>\n"
ANSWER_TURN = "<|im_start|>assistant\nHello<|im_end|>\n"
GENERATION = "<|im_start|>assistant\n<think>\n"
GOOD = SYSTEM_TURN + USER_TURN + GENERATION
OFF = GOOD + "\n</think>\n\n"
TOOL_TURNS = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nR\n</think>\n\n<tool_call>\n"
    "<function=get_weather>\n<parameter=city>\nP\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nok\n</tool_response>\n<tool_response>\nok2\n</tool_response><|im_end|>\n" + GENERATION
)


def of_rule(rule: str, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.rule == rule]
