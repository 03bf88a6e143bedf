"""Reasoning, content and tool calls out of a model's output, streamed or whole with the same result.

parser = OutputParser(request["tools"], ends_in_thinking(prompt))
for piece in generated:
    events = parser.feed(piece)             Reasoning, Content, ToolCall, Diagnostic
events = parser.finish(truncated=False)
"""

from a3b_gguf.toolcalls.events import Content, Diagnostic, Event, Reasoning, ToolCall
from a3b_gguf.toolcalls.parser import OutputParser

__all__ = ["Content", "Diagnostic", "Event", "OutputParser", "Reasoning", "ToolCall"]
