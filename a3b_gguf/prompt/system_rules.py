"""Rules over the system message: there once, first, a plain text that is not wrapped a second time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from a3b_gguf.prompt.characters import is_blank
from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.foreign import foreign_delimiter
from a3b_gguf.prompt.message_rules import MEDIA
from a3b_gguf.prompt.view import RequestView, shown

TOOLS_BLOCK = re.compile(r"^# Tools\b|<tools>", re.MULTILINE)
SOFT_SWITCH = re.compile(r"(?<![\w/])/(?:no_)?think(?![\w/>])")


def system_present(view: RequestView) -> Iterator[Hit]:
    mapped = view.developer == "system" and view.of_role("developer")
    if view.messages and not view.of_role("system") and not mapped:
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
        where = f"{entry.where}.content"
        if any(_is_media(part) for part in entry.parts):
            yield Hit(where, "the system message holds an image or a video")
        elif view.profile.list_content:
            yield Hit(where, "the system message is a list of parts; they are joined without a separator", severity="warning")
        else:
            yield Hit(where, f"the system message is a list of parts, which the template of {view.profile.name} cannot read")


def _is_media(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in MEDIA


def system_is_trimmed(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("system"):
        text = entry.text or ""
        if text != text.strip() and not is_blank(text):
            yield Hit(f"{entry.where}.content", "whitespace around the system message: some templates trim it, others keep it")


def system_is_not_wrapped(view: RequestView) -> Iterator[Hit]:
    starts = tuple(mark for mark in (*view.profile.turn_starts, view.profile.turn_end) if mark)
    for entry in view.of_role("system"):
        found = next((mark for mark in starts if mark in (entry.text or "")), None)
        if found:
            message = f"the system message holds the turn's own delimiter {found}: the template would wrap it a second time"
            yield Hit(f"{entry.where}.content", message, at=(entry.text or "").index(found))


def system_has_no_foreign_delimiter(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("system"):
        found = foreign_delimiter(entry.text or "", view.profile)
        if found:
            message = f"{shown(found[1][0])} is a delimiter of {found[0]}; to this model it is ordinary text"
            yield Hit(f"{entry.where}.content", message, at=found[1].start())


def tools_are_told_once(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("system") if view.tools else ():
        found = TOOLS_BLOCK.search(entry.text or "")
        if found:
            message = f"the system message describes tools ({found[0]!r}) while `tools` is given: the template writes its own description"
            yield Hit(f"{entry.where}.content", message, at=found.start())


def no_dead_switch(view: RequestView) -> Iterator[Hit]:
    if view.profile.soft_switch:
        return
    for entry in view.entries:
        found = SOFT_SWITCH.search(entry.text or "") if entry.role in ("system", "user") else None
        if found:
            yield Hit(f"{entry.where}.content", f"{found[0]} has no meaning to this model", at=found.start())


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
    Rule("M035", "warning", "No whitespace around the system message.", "trim it", system_is_trimmed),
    Rule("M036", "error", "No delimiters of turns inside the system message.", "send the text alone", system_is_not_wrapped),
    Rule("M037", "error", "No delimiters of other model families in the system message.", "remove them", system_has_no_foreign_delimiter),
    Rule("M038", "warning", "The system message describes no tools while `tools` is given.", "drop one of the two", tools_are_told_once),
    Rule(
        "M039",
        "warning",
        "No `/think` or `/no_think` for a model that was not trained on them.",
        "send chat_template_kwargs: {enable_thinking: false}",
        no_dead_switch,
    ),
)
