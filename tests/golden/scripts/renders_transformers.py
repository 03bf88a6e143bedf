"""Writes tests/golden/renders_transformers.json: what Hugging Face's own renderer makes of the templates. Needs transformers.

python tests/golden/scripts/renders_transformers.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

TESTS = Path(__file__).parent.parent.parent
sys.path.insert(0, str(TESTS))

from templates import NAMES, template_text  # noqa: E402 - the folder of the tests is no package

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt <b>Chiles</b> Hauptstadt?"}
ANSWER = {"role": "assistant", "content": "Santiago."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Santiago", "days": 2, "now": True}}}
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city, in °C & mm.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "now": {"type": "boolean"}},
                "required": ["city"],
            },
        },
    }
]
THOUGHT = {"role": "assistant", "content": "Santiago.", "reasoning_content": "I know that."}
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = {
    "question": ([USER], None, {}),
    "system": ([SYSTEM, USER], None, {}),
    "no thinking": ([SYSTEM, USER], None, {"enable_thinking": False}),
    "thinking": ([SYSTEM, USER], None, {"enable_thinking": True}),
    "turns": ([SYSTEM, USER, ANSWER, USER, ANSWER, USER], None, {}),
    "thoughts": ([SYSTEM, USER, THOUGHT, USER], None, {}),
    "kept thoughts": ([SYSTEM, USER, THOUGHT, USER], None, {"preserve_thinking": True}),
    "tools": ([SYSTEM, USER], TOOLS, {}),
    "call and result": ([SYSTEM, USER, CALL, {"role": "tool", "tool_call_id": "call_1", "content": "20 °C"}], TOOLS, {}),
    "late system": ([USER, SYSTEM], None, {}),
    "nobody asks": ([SYSTEM], None, {}),
}


def rendered(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> str | None:
    """The prompt, or None when the template raises or fails."""
    try:
        texts, _ = render_jinja_template([messages], tools, chat_template=template_text(name), add_generation_prompt=True, **options)
    except Exception:  # a template may fail in any way
        return None
    return str(texts[0])


cases = [{"case": case, "messages": messages, "tools": tools, "options": options} for case, (messages, tools, options) in CASES.items()]
renders = {name: {case: rendered(name, *given) for case, given in CASES.items()} for name in NAMES}
golden = {"transformers": transformers.__version__, "cases": cases, "renders": renders}
(TESTS / "golden" / "renders_transformers.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
