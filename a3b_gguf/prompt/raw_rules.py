"""Rules over a prompt that is already rendered: is it what the model's template would have written?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from a3b_gguf.prompt.characters import is_blank
from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.foreign import foreign_families
from a3b_gguf.prompt.raw_view import RawView
from a3b_gguf.prompt.view import shown

RAW_ROLES = ("system", "user", "assistant")  # a tool's result stands in a user turn


def _hit(view: RawView, at: int, message: str, fix: str = "") -> Hit:
    where, offset = view.place(at)
    return Hit(where, message, fix, offset=offset)


def _has_foreign(view: RawView) -> bool:
    return any(pattern.search(view.text) for _, pattern in foreign_families(view.profile))


def starts_with_turn(view: RawView) -> Iterator[Hit]:
    opener = view.profile.turn_starts[0]
    before = view.text[: view.turns[0].start] if view.turns else view.text
    if not view.turns and not _has_foreign(view):
        yield _hit(
            view,
            0,
            f"there is no {opener}: this is no prompt with turns",
            f"write {view.profile.opener('system')!r}, the text, {view.profile.turn_end!r} and so on",
        )
    elif view.turns and before:
        yield _hit(view, 0, f"{shown(before)} stands before the first {opener}")


def system_is_first(view: RawView) -> Iterator[Hit]:
    if not view.turns or view.turns[0].role == "system":
        return
    late = next((turn for turn in view.turns if turn.role == "system"), None)
    if late:
        yield _hit(view, late.start, f"the system turn comes after a turn of {shown(view.turns[0].header)}")
    else:
        hit = _hit(view, view.turns[0].start, "there is no system turn", "put one in front")
        yield Hit(hit.where, hit.message, hit.fix, "error" if view.system == "required" else "note", hit.offset)


def system_opener(view: RawView) -> Iterator[Hit]:
    for turn in view.turns:
        if turn.role == "system" and (turn.header != "system" or not turn.has_newline) and not _backslash(turn.header):
            yield _hit(
                view,
                turn.start,
                f"the opener is {shown(view.text[turn.start : turn.body_start])}, expected {view.profile.opener('system')!r}",
            )


def system_closed(view: RawView) -> Iterator[Hit]:
    for turn in view.turns:
        if turn.role == "system" and not turn.closed:
            yield _hit(view, turn.end, f"the system turn is not closed by {view.profile.turn_end}")


def system_once(view: RawView) -> Iterator[Hit]:
    found = [turn for turn in view.turns if turn.role == "system"]
    for turn in found[1:]:
        yield _hit(view, turn.start, f"a second system turn; the first is at {view.place(found[0].start)[0]}")


def system_not_empty(view: RawView) -> Iterator[Hit]:
    for turn in view.turns:
        if turn.header == "system" and is_blank(turn.body):
            yield _hit(view, turn.body_start, "the system turn is empty")


def body_is_trimmed(view: RawView) -> Iterator[Hit]:
    for turn in view.closed_turns:
        plain = turn.header in ("system", "user") and "</tool_response>" not in turn.body  # templates put newlines around results
        if plain and turn.closed and turn.body != turn.body.strip() and not is_blank(turn.body):
            yield _hit(view, turn.body_start, f"whitespace at the start or end of the text of a {turn.header} turn")


def turn_closed(view: RawView) -> Iterator[Hit]:
    for turn in view.closed_turns:
        if not turn.closed and turn.role != "system":
            yield _hit(
                view, turn.end, f"the turn of {shown(turn.header)} at {view.place(turn.start)[0]} is not closed by {view.profile.turn_end}"
            )


def closer_has_turn(view: RawView) -> Iterator[Hit]:
    for at in view.strays:
        yield _hit(view, at, f"{view.profile.turn_end} closes no turn")


def one_newline_between(view: RawView) -> Iterator[Hit]:
    for turn, following in zip(view.turns, view.turns[1:], strict=False):
        gap = view.text[turn.after : following.start]
        if turn.closed and gap != "\n" and view.profile.turn_end not in gap:
            yield _hit(view, turn.after, f"{shown(gap) if gap else 'nothing'} stands between two turns, expected one newline")


def role_is_known(view: RawView) -> Iterator[Hit]:
    for turn in view.turns:
        if turn.role != "system" and not (turn.header in RAW_ROLES and turn.has_newline) and not _backslash(turn.header):
            fix = "put the result into a user turn, inside <tool_response> tags" if turn.role == "tool" else ""
            yield _hit(
                view, turn.start, f"there is no role {shown(turn.header)}" + ("" if turn.has_newline else " with a newline after it"), fix
            )


def no_foreign_delimiter(view: RawView) -> Iterator[Hit]:
    for family, pattern in foreign_families(view.profile):
        outside = next((match for match in pattern.finditer(view.text) if not view.is_in_body(match.start())), None)
        found = outside or pattern.search(view.text)
        if found:
            where, offset = view.place(found.start())
            message = f"{shown(found[0])} is a delimiter of {family}; to this model it is ordinary text"
            yield Hit(where, message, "", "error" if outside else "warning", offset)


def ends_with_generation(view: RawView) -> Iterator[Hit]:
    if view.turns and view.generation is None and not view.complete:
        fix = f"append {view.profile.generation_on!r}"
        yield _hit(view, len(view.text), "the prompt does not end with the opener of the assistant's answer", fix)


def generation_fits(view: RawView) -> Iterator[Hit]:
    found, forms = view.generation, _forms(view)
    if found is not None and not any(found.startswith(form) for form in forms) and not _backslash(view.turns[-1].header):
        yield _hit(
            view, view.turns[-1].start, f"the answer is opened by {shown(found, 60)}, this template writes {' or '.join(map(repr, forms))}"
        )


def nothing_after_generation(view: RawView) -> Iterator[Hit]:
    found = view.generation
    fitting = [form for form in _forms(view) if found is not None and found.startswith(form)]
    if found is None or not fitting or found in fitting:
        return
    rest = found[len(max(fitting, key=len)) :]
    hit = _hit(view, len(view.text) - len(rest), f"{shown(rest)} stands after the opener of the answer")
    if rest.isspace():
        yield hit
    else:
        yield Hit(hit.where, hit.message + ": the model goes on from there", "leave it out unless you want that", "warning", hit.offset)


def newlines_are_real(view: RawView) -> Iterator[Hit]:
    for turn in view.turns:
        if _backslash(turn.header):
            yield _hit(view, turn.start, f"a backslash and an n stand after {turn.role!r} instead of a newline")


def _backslash(header: str) -> bool:
    return re.match(r"(?:system|user|assistant)\\n", header) is not None


def _forms(view: RawView) -> list[str]:
    return list(dict.fromkeys((view.profile.generation_on, view.profile.generation_off)))


RAW_RULES: tuple[Rule[RawView], ...] = (
    Rule("R001", "error", "Nothing stands before the first turn.", "remove it", starts_with_turn),
    Rule(
        "R002",
        "error",
        "The first turn is the system's; no system turn at all is a note unless `--system required`.",
        "move it to the front",
        system_is_first,
    ),
    Rule("R003", "error", "The system turn opens with exactly `<|im_start|>system` and a newline.", "write it exactly so", system_opener),
    Rule("R004", "error", "The system turn is closed.", "close it with <|im_end|> and a newline", system_closed),
    Rule("R005", "error", "There is one system turn.", "merge them into the first", system_once),
    Rule("R006", "error", "The system turn says something.", "write what the model shall be, or leave the turn out", system_not_empty),
    Rule("R007", "warning", "System and user text has no whitespace around it.", "trim it", body_is_trimmed),
    Rule("R008", "error", "A turn is closed before the next opens.", "close it with <|im_end|> and a newline", turn_closed),
    Rule("R009", "error", "Each `<|im_end|>` closes a turn.", "remove it", closer_has_turn),
    Rule("R010", "error", "One newline stands between turns, nothing else.", "put exactly one newline there", one_newline_between),
    Rule(
        "R011", "error", "A turn's role is system, user or assistant, then a newline.", "use one of system, user, assistant", role_is_known
    ),
    Rule(
        "R012",
        "error",
        "No delimiters of other model families; inside a turn's text they are a warning.",
        "write turns as the model's template does: <|im_start|>role, a newline, the text, <|im_end|>, a newline",
        no_foreign_delimiter,
    ),
    Rule("R013", "error", "The prompt ends with the opener of the answer, unless `--no-gen` is given.", "append it", ends_with_generation),
    Rule("R014", "error", "The opener of the answer is one that this template writes.", "write it exactly so", generation_fits),
    Rule(
        "R015",
        "error",
        "Nothing stands after the opener of the answer; text, which the model would continue, is a warning.",
        "strip it; editors and echo add a newline at the end of a file",
        nothing_after_generation,
    ),
    Rule(
        "R026",
        "error",
        "Newlines are newlines, not a backslash and an n.",
        "quote it as $'…' in a shell, or read the prompt from a file",
        newlines_are_real,
    ),
)
