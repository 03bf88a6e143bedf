"""What a verified request must become before a template sees it.

llama.cpp does the same to every request (common/chat.cpp, common_chat_templates_apply): arguments that are a string become
an object, missing content becomes "", typed content becomes text, `developer` becomes `system`. Templates of this family need it: Qwen3
crashes on null content, Qwen3.5 and Qwen3-Coder on string arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from a3b_gguf.prompt.apart import Rendered, render_apart
from a3b_gguf.prompt.view import DeveloperPolicy, content_text
from a3b_gguf.strict_json import loads
from a3b_gguf.template import NO_OPTIONS, Template


def normalise(messages: Sequence[Mapping[str, Any]], developer: DeveloperPolicy = "refuse") -> list[dict[str, Any]]:
    """New messages with content a string, arguments objects, and keys that are null left out. Only after verify_request found no error.

    developer: "system" puts the text of developer messages into the one system message, in front, a blank line between them.
    """
    found = [_message(message) for message in messages]
    return _with_one_system(found) if developer == "system" else found


def render_request(template: Template, request: Mapping[str, Any], developer: DeveloperPolicy = "refuse") -> str:
    """The prompt of a request that verify_request found no error in. Raises TemplateRefused in the template's own words."""
    return render_request_apart(template, request, (), developer).text


def render_request_apart(
    template: Template, request: Mapping[str, Any], controls: tuple[str, ...], developer: DeveloperPolicy = "refuse"
) -> Rendered:
    """The prompt of a request that verify_request found no error in, as `render_apart` gives it. Raises what that raises."""
    return render_apart(
        template,
        normalise(request["messages"], developer),
        request.get("tools") or None,
        controls,
        request.get("chat_template_kwargs") or NO_OPTIONS,
        request.get("continue_final_message") is True,
    )


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


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
