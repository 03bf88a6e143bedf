"""Mends a rendered prompt where its form alone is wrong. Texts are never changed but for whitespace at their edges."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from a3b_gguf.prompt.characters import INVISIBLE
from a3b_gguf.prompt.findings import Finding
from a3b_gguf.prompt.fix import Change, Fixed
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.prompt.raw_view import RawView, view_raw

Check = Callable[[str], list[Finding]]
RawFixer = Callable[[RawView], str]
MAX_ROUNDS = 8
ROLES = ("system", "user", "assistant")


def fix_raw(text: str, profile: Profile, check: Check) -> Fixed:
    """Mends and checks until nothing changes any more."""
    changes: list[Change] = []
    findings = check(text)
    for _ in range(MAX_ROUNDS):
        rules = {finding.rule: finding for finding in findings}
        before = text
        for rule, what, fixer in RAW_FIXERS:
            if rule in rules:
                new = fixer(view_raw(text, profile))
                if new != text:
                    changes.append(Change(rule, rules[rule].where, what))
                    text = new
        if text == before:
            break
        findings = check(text)
    return Fixed(text, tuple(changes), tuple(findings))


def _cut(text: str, edits: Iterator[tuple[int, int, str]]) -> str:
    """`text` with each [start, stop) replaced; edits come in order and do not overlap."""
    pieces, at = [], 0
    for start, stop, new in edits:
        pieces += [text[at:start], new]
        at = stop
    return "".join([*pieces, text[at:]])


def strip_front(view: RawView) -> str:
    before = view.text[: view.turns[0].start] if view.turns else ""
    harmless = not INVISIBLE.sub("", before).strip() or before.strip() in ("<s>", "<|begin_of_text|>", "<|endoftext|>")
    return view.text[len(before) :] if harmless else view.text


def unix_scaffold(view: RawView) -> str:
    return view.text.replace("\r\n", "\n")


def real_newlines(view: RawView) -> str:
    """Backslash-n behind role words and turn ends; a prompt whose every newline is one becomes one with newlines."""
    end = re.escape(view.profile.turn_end)
    text = re.sub(r"((?:<\|im_start\|>|<\|)(?:system|user|assistant)(?:\|>)?)\\n", r"\1\n", view.text)
    text = re.sub(rf"({end})\\n", r"\1\n", text)
    return re.sub(r"(</?think>)\\n(?:\\n)?", lambda match: match[1] + "\n" * (match[0].count("\\n")), text)


def right_headers(view: RawView) -> str:
    def edits() -> Iterator[tuple[int, int, str]]:
        for turn in view.turns:
            opener = view.profile.opener(turn.role)
            written = view.text[turn.start : turn.body_start]
            if turn.role in ROLES and turn.header.strip(" \t\r:").lower() == turn.role and turn.has_newline and written != opener:
                yield turn.start, turn.body_start, opener

    return _cut(view.text, edits())


def close_turns(view: RawView) -> str:
    def edits() -> Iterator[tuple[int, int, str]]:
        for turn in view.closed_turns:
            if not turn.closed and turn.has_newline:
                body = view.text[turn.body_start : turn.end]
                yield turn.body_start + len(body.rstrip()), turn.end, view.profile.turn_end + "\n"

    return _cut(view.text, edits())


def one_newline(view: RawView) -> str:
    def edits() -> Iterator[tuple[int, int, str]]:
        for turn, following in zip(view.turns, view.turns[1:], strict=False):
            gap = view.text[turn.after : following.start]
            if turn.closed and not gap.strip() and gap != "\n":
                yield turn.after, following.start, "\n"

    return _cut(view.text, edits())


def trim_bodies(view: RawView) -> str:
    def edits() -> Iterator[tuple[int, int, str]]:
        for turn in view.closed_turns:
            if turn.header in ("system", "user") and turn.body.strip():
                yield turn.body_start, turn.end, turn.body.strip()

    return _cut(view.text, edits())


def open_answer(view: RawView) -> str:
    text = view.text if view.text.endswith("\n") else view.text + "\n"
    return text + view.profile.generation_on if view.turns and view.turns[-1].closed else view.text


def right_answer(view: RawView) -> str:
    """The opener with a blank too many or too few; which thinking was meant is seen in its tags."""
    found = view.generation
    if found is None:
        return view.text
    forms = dict.fromkeys((view.profile.generation_on, view.profile.generation_off))
    same = [form for form in forms if "".join(form.split()) == "".join(found.split())]
    return view.text[: len(view.text) - len(found)] + same[0] if len(same) == 1 else view.text


def strip_end(view: RawView) -> str:
    found = view.generation
    forms = sorted({view.profile.generation_on, view.profile.generation_off}, key=len, reverse=True)
    form = next((form for form in forms if found is not None and found.startswith(form)), None)
    if found is None or form is None or found[len(form) :].strip():
        return view.text
    return view.text[: len(view.text) - len(found) + len(form)]


RAW_FIXERS: Sequence[tuple[str, str, RawFixer]] = (
    ("R021", "carriage returns became newlines", unix_scaffold),
    ("R026", "backslash-n became a newline", real_newlines),
    ("R001", "what stood before the first turn was removed", strip_front),
    ("R003", "the opener was written as the template writes it", right_headers),
    ("R011", "the opener was written as the template writes it", right_headers),
    ("R004", "the turn was closed", close_turns),
    ("R008", "the turn was closed", close_turns),
    ("R010", "one newline was put between turns", one_newline),
    ("R007", "whitespace around texts was removed", trim_bodies),
    ("R013", "the opener of the answer was added", open_answer),
    ("R014", "the opener of the answer was written as the template writes it", right_answer),
    ("R015", "what stood behind the opener of the answer was removed", strip_end),
)
