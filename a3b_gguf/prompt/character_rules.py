"""Rules over the characters of every string in a request."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from a3b_gguf.prompt.characters import BIDI, C0, INVISIBLE, SURROGATE, ZERO_WIDTH, first_invisible, hidden_tags
from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import RequestView, path_text

SYSTEM_BIDI = re.compile(f"[{BIDI}]")
NAMES = ("role", "name", "id", "tool_call_id")  # strings that programs compare
EDGE = re.compile(f"^[{ZERO_WIDTH}]|[{ZERO_WIDTH}]$")


def has_no_surrogate(view: RequestView) -> Iterator[Hit]:
    for path, text in view.odd:
        match = SURROGATE.search(text)
        if match:
            message = f"unpaired surrogate U+{ord(match[0]):04X} at character {match.start()}: no UTF-8 text can hold it"
            yield Hit(path_text(path), message, at=match.start())


def has_no_control_character(view: RequestView) -> Iterator[Hit]:
    for path, text in view.odd:
        match = C0.search(text)
        if match and "\0" in text:
            yield Hit(path_text(path), f"NUL at character {text.index(chr(0))}", at=text.index("\0"))
        elif match:
            message = f"control character U+{ord(match[0]):04X} at character {match.start()}"
            yield Hit(path_text(path), message, severity="warning", at=match.start())


def has_nothing_invisible(view: RequestView) -> Iterator[Hit]:
    systems = {f"{entry.where}.content" for entry in view.of_role("system")}
    for path, text in view.odd:
        if not INVISIBLE.search(text):
            continue
        where = path_text(path)
        tags = hidden_tags(text)
        if tags:
            message = f"{len(tags[0])} tag characters from character {tags.start()}: text that a model reads and a person does not see"
            yield Hit(where, message, severity="error", at=tags.start())
            continue
        match = first_invisible(text)
        if match:
            in_system = where.startswith(tuple(systems)) if systems else False
            named = path[1].removeprefix(".") in NAMES
            grave = named or (in_system and (SYSTEM_BIDI.search(text) or EDGE.search(text)))
            message = f"invisible character U+{ord(match[0]):04X} at character {match.start()}"
            yield Hit(where, message, severity="error" if grave else None, at=match.start())


def has_unix_lines(view: RequestView) -> Iterator[Hit]:
    for path, text in view.odd:
        if "\r" in text:
            yield Hit(path_text(path), f"carriage return at character {text.index(chr(13))}: it stays in the prompt", at=text.index("\r"))


def is_composed(view: RequestView) -> Iterator[Hit]:
    for path, text in view.wide:
        if not unicodedata.is_normalized("NFC", text):
            yield Hit(path_text(path), "not in Unicode's composed form (NFC): the same letters as other tokens")


CHARACTER_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M006", "error", "No unpaired surrogate in any string.", "replace it by U+FFFD", has_no_surrogate),
    Rule("M007", "error", "No NUL in any string; other control characters are a warning.", "delete it", has_no_control_character),
    Rule(
        "M008",
        "warning",
        "Nothing invisible: an error for text in tag characters, in a role, name or id, at the edge of the system message, and for "
        "direction marks in it. Joiners inside words and emoji are fine.",
        "remove it",
        has_nothing_invisible,
    ),
    Rule("M009", "warning", "Lines end with \\n, not \\r\\n.", "write \\n", has_unix_lines),
    Rule("M010", "note", "Text is in composed form (NFC).", "normalize it, if you do not want it so", is_composed),
)
