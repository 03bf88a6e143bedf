"""Where in a JSON text a finding is: from `messages[2].content` and a character of that string to a character of the text."""

from __future__ import annotations

import json
import re

STEP = re.compile(r"\.?([A-Za-z_$][\w-]*)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]")
SPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


def locate(text: str, where: str, at: int | None = None) -> int | None:
    """The character where the value of `where` begins, or that of its innermost part that is there; None when nothing of it is.

    at: a character of the string that stands there. `text` must be valid JSON. A list of messages alone counts as `messages`.
    """
    steps = _steps(where)
    if steps is None:
        return None
    place = _skip(text, 0)
    if text[place : place + 1] == "[" and steps[:1] == ["messages"]:
        steps = steps[1:]
    elif text[place : place + 1] == "[" and steps[:1] != ["$"]:
        return None
    if steps[:1] == ["$"]:
        steps = steps[1:]
    whole = True
    for step in steps:
        inner = _item(text, place, step) if isinstance(step, int) else _member(text, place, step)
        if inner is None:
            whole = False
            break
        place = inner
    return _inside(text, place, at) if whole and at else place


def _steps(where: str) -> list[str | int] | None:
    steps: list[str | int] = []
    at = 0
    while at < len(where):
        match = STEP.match(where, at)
        if match is None:
            return None
        word, index, quoted, double = match.groups()
        steps.append(int(index) if index is not None else word if word is not None else (quoted if quoted is not None else double))
        at = match.end()
    return steps


def _skip(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _end(text: str, at: int) -> int:
    """Behind the value that begins at `at`."""
    return DECODER.raw_decode(text, at)[1]


def _item(text: str, at: int, index: int) -> int | None:
    if text[at : at + 1] != "[":
        return None
    at = _skip(text, at + 1)
    while text[at : at + 1] not in ("]", ""):
        if index == 0:
            return at
        at = _skip(text, _end(text, at))
        at = _skip(text, at + 1) if text[at : at + 1] == "," else at
        index -= 1
    return None


def _member(text: str, at: int, key: str) -> int | None:
    """The last member of that name, which is the one that Python takes."""
    if text[at : at + 1] != "{":
        return None
    at = _skip(text, at + 1)
    found = None
    while text[at : at + 1] == '"':
        name, at = DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        if name == key:
            found = at
        at = _skip(text, _end(text, at))
        at = _skip(text, at + 1) if text[at : at + 1] == "," else at
    return found


def _inside(text: str, place: int, at: int) -> int:
    """The place of character `at` of the string that begins at `place`, over its escapes."""
    if text[place : place + 1] != '"':
        return place
    here = place + 1
    for _ in range(at):
        if text[here] == '"':
            break
        if text[here] != "\\":
            here += 1
        elif text[here + 1] != "u":
            here += 2
        else:
            is_pair = text[here + 2 : here + 4].lower() in ("d8", "d9", "da", "db") and text[here + 6 : here + 8] == "\\u"
            here += 12 if is_pair else 6
    return here
