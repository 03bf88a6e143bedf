"""`a3b toolbench`: questions from a set, asked of an endpoint or replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from a3b_gguf.errors import UsageError
from a3b_gguf.toolbench.bench import Result, run
from a3b_gguf.toolbench.endpoint import Endpoint, Thinking
from a3b_gguf.toolbench.question import Message, read_questions
from a3b_gguf.toolbench.replay import replay
from a3b_gguf.toolbench.score import Reply


def ask_endpoint(  # one argument a flag
    endpoint: Endpoint, questions: str, trials: int, thinking: str, max_tokens: int, tell: Callable[[int, int], None]
) -> Result:
    """Raises UsageError for flags and an address that cannot be obeyed, MachineLacks when nobody answers there."""
    if thinking not in get_args(Thinking):
        raise UsageError(f"--thinking: {thinking!r} is not known", "on, off or auto")
    asked = read_questions(questions)
    if not endpoint.url:
        raise UsageError("nobody is named to ask", "give the address of an endpoint, like http://127.0.0.1:8080/v1, or --replay")
    checked = endpoint.check()

    def ask(messages: Sequence[Message], tools: Sequence[Message], with_thinking: Thinking) -> Reply:
        return checked.ask(messages, tools, with_thinking, max_tokens)

    wanted: Thinking = "on" if thinking == "on" else "off" if thinking == "off" else "auto"
    return run(asked, ask, trials, wanted, tell)


def replay_outputs(url: str | None) -> Result:
    """The stored outputs through the parser. Raises UsageError when an endpoint is given too."""
    if url:
        raise UsageError("--replay asks nobody, and an endpoint is given too", "leave one of them out")
    return replay()
