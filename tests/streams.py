"""What a client makes of a stream."""

from __future__ import annotations

from typing import Any


def joined(stream: Any) -> tuple[dict[str, Any], list[Any]]:
    """What a client makes of a stream: message, finish reason and usage; and the chunks themselves."""
    chunks = list(stream)
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None, "usage": None}
    for chunk in chunks:
        said["usage"] = chunk.usage or said["usage"]
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            said["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(said["tool_calls"])
                    said["tool_calls"].append([call.index, call.id, call.function.name, ""])
                said["tool_calls"][call.index][3] += call.function.arguments
            said["finish_reason"] = choice.finish_reason or said["finish_reason"]
    return said, chunks
