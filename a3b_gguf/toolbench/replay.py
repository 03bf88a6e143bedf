"""Stored outputs in place of a model: shows what the parser makes of them, without a model and without a network.

`sets/replay.toml` has for every question of the general set the raw text of each step, in the forms that models really write.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from a3b_gguf.toolbench.bench import Line, Result, judge
from a3b_gguf.toolbench.question import FOLDER, Message, Question, read_questions
from a3b_gguf.toolbench.score import Reply, score
from a3b_gguf.toolcalls import Content, OutputParser, ToolCall

CHUNKS = (0, 1, 2, 3, 7)  # characters that arrive together; 0: all


@dataclass(frozen=True, slots=True)
class Output:
    """What a model wrote for one question, step by step. thinking: the prompt ended inside an open think block."""

    question: int
    texts: tuple[str, ...]
    thinking: bool = False


def outputs() -> tuple[Output, ...]:
    held = tomllib.loads((FOLDER.parent / "replay.toml").read_text(encoding="utf-8"))
    return tuple(Output(each["question"], tuple(each["texts"]), each.get("thinking", False)) for each in held["output"])


def replay() -> Result:
    """One trial for each way of cutting the outputs into pieces; all must have all points."""
    questions = {question.number: question for question in read_questions("general")}
    lines = []
    for trial, size in enumerate(CHUNKS, 1):
        for output in outputs():
            question = questions[output.question]
            replies = [parsed(text, question.tools, output.thinking, size) for text in filled(output, question)]
            lines.append(Line(question.number, question.block, question.title, trial, score(question, replies)))
    return judge(lines)


def filled(output: Output, question: Question) -> Iterator[str]:
    """The texts, with `{payload}` in place of what is too long to store twice."""
    written = [call.arguments["content"] for step in question.steps for call in step.calls if "content" in call.arguments]
    for text in output.texts:
        yield text.replace("{payload}", written[0]) if written else text


def parsed(text: str, tools: Sequence[Message], thinking: bool, size: int) -> Reply:
    """The assistant's message as a server would answer it."""
    parser = OutputParser(tools, thinking)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(truncated=False)
    calls = [
        {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.arguments}}
        for event in events
        if isinstance(event, ToolCall)
    ]
    content = "".join(event.text for event in events if isinstance(event, Content))
    message: Message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    return Reply(message, "tool_calls" if calls else "stop")
