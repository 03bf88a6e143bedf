"""What a verified request must become before a template sees it.

llama.cpp does the same to every request (common/chat.cpp, common_chat_templates_apply): arguments that are a string become
an object, missing content becomes "", typed content becomes text. Templates of this family need it: Qwen3 crashes on null
content, Qwen3.5 and Qwen3-Coder on string arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from a3b_gguf.prompt.view import content_text
from a3b_gguf.strict_json import loads
from a3b_gguf.template import NO_OPTIONS, ChatTemplate


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """New messages with content a string, arguments objects, and keys that are null left out. Only after verify_request found no error."""
    return [_message(message) for message in messages]


def render_request(template: ChatTemplate, request: Mapping[str, Any], add_generation_prompt: bool = True) -> str:
    """The prompt of a request that verify_request found no error in. Raises TemplateRefused in the template's own words."""
    options = request.get("chat_template_kwargs") or NO_OPTIONS
    return template.render(normalise(request["messages"]), request.get("tools") or None, add_generation_prompt, options)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = content_text(message.get("content")) or ""
    if "tool_calls" in found:
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = loads(function["arguments"])
    return {**call, "function": function}
