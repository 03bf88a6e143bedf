"""Rules over the conversation as a whole: the system message first and once, somebody who asks, nobody who speaks out of turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from a3b_gguf.prompt.characters import is_blank
from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.message_rules import MEDIA
from a3b_gguf.prompt.view import RequestView


def system_present(view: RequestView) -> Iterator[Hit]:
    if view.messages and not view.of_role("system"):
        yield Hit("messages", "there is no system message", severity="error" if view.system == "required" else None)


def system_first(view: RequestView) -> Iterator[Hit]:
    found = view.of_role("system")
    if found and found[0].index > 0:
        yield Hit(found[0].where, f"the system message is at index {found[0].index}, it must be messages[0]")


def system_once(view: RequestView) -> Iterator[Hit]:
    found = view.of_role("system")
    for entry in found[1:]:
        yield Hit(entry.where, f"a second system message; the first is {found[0].where}", f"merge its text into {found[0].where}")


def system_not_empty(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("system"):
        if entry.text is not None and is_blank(entry.text) and not any(_is_media(part) for part in entry.parts):
            what = "empty" if not entry.text else "nothing but whitespace and invisible characters"
            yield Hit(f"{entry.where}.content", f"the system message is {what}")


def system_is_text(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("system"):
        if not isinstance(entry.content, list):
            continue
        if any(_is_media(part) for part in entry.parts):
            yield Hit(f"{entry.where}.content", "the system message holds an image or a video")
        elif view.profile.list_content:
            yield Hit(
                f"{entry.where}.content", "the system message is a list of parts; they are joined without a separator", severity="warning"
            )
        else:
            yield Hit(
                f"{entry.where}.content", f"the system message is a list of parts, which the template of {view.profile.name} cannot read"
            )


def _is_media(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in MEDIA


def somebody_asks(view: RequestView) -> Iterator[Hit]:
    if view.messages and not view.of_role("user"):
        yield Hit("messages", "there is no user message")


def last_is_not_assistant(view: RequestView) -> Iterator[Hit]:
    last = view.entries[-1] if view.entries else None
    if (
        last
        and last.role == "assistant"
        and last.index == len(view.messages) - 1
        and view.request.get("continue_final_message") is not True
    ):
        yield Hit(last.where, "the last message is the assistant's: the template would close it and open a second answer")


SYSTEM_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M030",
        "note",
        "There is a system message; an error with `--system required`.",
        'add {"role": "system", "content": ...} in front',
        system_present,
    ),
    Rule("M031", "error", "The system message is messages[0].", "move it to the front", system_first),
    Rule("M032", "error", "There is one system message.", "merge them into the first", system_once),
    Rule(
        "M033", "error", "The system message says something.", "write what the model shall be, or leave the message out", system_not_empty
    ),
    Rule(
        "M034",
        "error",
        "The system message is a string; a list of text parts is a warning where the template takes lists.",
        "send a string",
        system_is_text,
    ),
)
ORDER_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M040", "error", "There is a user message.", "add what the user asks", somebody_asks),
    Rule(
        "M044",
        "error",
        "The last message is not the assistant's, unless `continue_final_message` is true.",
        "drop it, or send continue_final_message: true",
        last_is_not_assistant,
    ),
)
