"""Reasoning, content and tool calls out of a model's output, streamed or whole with the same result.

parser = OutputParser(request["tools"], ends_in_thinking(prompt))
for piece in generated:
    events = parser.feed(piece)             Reasoning, Content, ToolCallDelta, ToolCall, Diagnostic
events = parser.finish(truncated=False)

Remarks (Diagnostic), ids stable. Mended, and there is a call: O001 its opener is missing, O002 a closer is missing, O004 a closing tag
inside a value is text, O005 it stands in open reasoning, O010 another spelling of the name, O013 JSON repaired (by which repairs),
O016 unknown parameter left out, O018 parameter twice, O021 malformed or stray tag left
out. No call, the output is content: O002 never closed, O011 unknown tool, O012 no JSON, O014 no object, O015 a value does not fit its
schema, O017 a required parameter is missing. O003: cut off inside a call, which is dropped. O006: a call that is only quoted. O020:
text behind a call.
"""

from a3b_gguf.toolcalls.events import Content, Diagnostic, Event, Reasoning, ToolCall, ToolCallDelta
from a3b_gguf.toolcalls.parser import OutputParser

__all__ = ["Content", "Diagnostic", "Event", "OutputParser", "Reasoning", "ToolCall", "ToolCallDelta"]
