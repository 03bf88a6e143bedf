"""Rules over the conversation as a whole: somebody asks, nobody speaks out of turn, and what is continued can be continued."""

from __future__ import annotations

from collections.abc import Iterator

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import Entry, RequestView


def somebody_asks(view: RequestView) -> Iterator[Hit]:
    if view.messages and not view.of_role("user"):
        yield Hit("messages", "there is no user message")


def somebody_really_asks(view: RequestView) -> Iterator[Hit]:
    users = view.of_role("user")
    if users and all(_is_wrapped(entry.text) for entry in users):
        yield Hit(f"{users[-1].where}.content", "every user message is a tool's result in disguise; templates look for a real question")


def _is_wrapped(text: str | None) -> bool:
    stripped = (text or "").strip()
    return stripped.startswith("<tool_response>") and stripped.endswith("</tool_response>")


def users_alternate(view: RequestView) -> Iterator[Hit]:
    for before, entry in zip(view.entries, view.entries[1:], strict=False):
        if before.role == entry.role == "user":
            yield Hit(entry.where, f"a second user message in a row after {before.where}")


def user_begins(view: RequestView) -> Iterator[Hit]:
    first = next((entry for entry in view.entries if entry.role not in ("system", "developer")), None)
    if first and first.role == "assistant":
        yield Hit(first.where, "the conversation begins with the assistant")


def _final_answer(view: RequestView) -> Entry | None:
    """The last message, when it is the assistant's."""
    last = view.entries[-1] if view.entries else None
    return last if last and last.role == "assistant" and last.index == len(view.messages) - 1 else None


def _continues(view: RequestView) -> bool:
    return view.request.get("continue_final_message") is True


def last_is_not_assistant(view: RequestView) -> Iterator[Hit]:
    last = _final_answer(view)
    if last and not _continues(view) and not view.complete:
        yield Hit(last.where, "the last message is the assistant's: the template would close it and open a second answer")


def thinking_is_closed(view: RequestView) -> Iterator[Hit]:
    last = _final_answer(view)
    if not last or not _continues(view) or not view.thinking:
        return
    before, closed, _ = (last.text or "").partition("</think>")
    if not (closed and "<think>" in before) and not last.message.get("reasoning_content"):
        yield Hit(f"{last.where}.content", "an answer that has not thought is to be continued while thinking is on")


def continued_has_no_calls(view: RequestView) -> Iterator[Hit]:
    last = _final_answer(view)
    if last and _continues(view) and last.message.get("tool_calls"):
        yield Hit(f"{last.where}.tool_calls", "a message with tool calls cannot be continued: the calls end it")


def one_answer_at_the_end(view: RequestView) -> Iterator[Hit]:
    last = _final_answer(view)
    if last and len(view.entries) > 1 and view.entries[-2].role == "assistant":
        yield Hit(last.where, f"a second answer in a row after {view.entries[-2].where}, at the end")


def one_way_to_answer(view: RequestView) -> Iterator[Hit]:
    if _continues(view) and view.request.get("add_generation_prompt") is True:
        yield Hit("add_generation_prompt", "add_generation_prompt and continue_final_message cannot both be true")


ORDER_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M040", "error", "There is a user message.", "add what the user asks", somebody_asks),
    Rule(
        "M041",
        "error",
        "A user message is more than a wrapped `<tool_response>`.",
        "send results with role 'tool', and what the user asked",
        somebody_really_asks,
    ),
    Rule("M042", "warning", "User messages do not follow each other.", "merge the two", users_alternate),
    Rule("M043", "warning", "The user speaks before the assistant.", "start with the user's message", user_begins),
    Rule(
        "M044",
        "error",
        "The last message is not the assistant's, unless `continue_final_message` is true or `--no-gen` is given.",
        "drop it, or send continue_final_message: true",
        last_is_not_assistant,
    ),
    Rule(
        "M045",
        "error",
        "A message that is continued while thinking is on holds its closed think block.",
        "send reasoning_content with it, or enable_thinking: false",
        thinking_is_closed,
    ),
    Rule("M046", "error", "A message that is continued has no tool calls.", "remove them", continued_has_no_calls),
    Rule("M047", "error", "Two answers do not stand at the end.", "merge the two", one_answer_at_the_end),
    Rule("M048", "warning", "Not both `add_generation_prompt` and `continue_final_message`.", "remove one of them", one_way_to_answer),
)
