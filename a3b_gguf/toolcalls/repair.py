"""JSON that a model almost wrote. Each repair has a name, and none guesses: what is not closed stays broken.

They are tried in order, each on what the one before left, until the text is strict JSON. The first ones are ours and exact. The last
is the json-repair package, which completes and drops things when it is let, so its result counts only when every letter and digit of
the text is in it, no more and no less.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from a3b_gguf.strict_json import NotJSON, dumps, loads

MOST_REPAIRED = 1 << 16  # characters; a model does not mean JSON that is longer and broken
# Quotation marks by which a string may open where JSON has none, and those that can close it.
OPENERS = {'"': '"', "'": "'", "“": "”“", "”": "”“", "„": "”“", "‘": "’‘", "’": "’‘", "＂": "＂", "「": "」", "『": "』"}
BEHIND_STRING = re.compile(r"\s*(?:[,:}\]，：]|//|/\*|\Z)")
FENCE = re.compile(r"\A```[A-Za-z]*\n(.*?)\n?```\Z", re.DOTALL)
LITERAL = re.compile(r"\b(?:True|False|None)\b")
LITERALS = {"True": "true", "False": "false", "None": "null"}
TRAILING_COMMA = re.compile(r",(\s*[}\]])")
RAW_CONTROL = re.compile(r"[\x00-\x1f]")
NO_VALUE = re.compile(r":\s*[,}\]]")
BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\"\\/bfnrtu]")
WORD = re.compile(r"[^\W_]")


@dataclass(frozen=True, slots=True)
class Repaired:
    """The value, and the names of the repairs that made it readable."""

    value: Any
    names: tuple[str, ...]


def repaired(text: str) -> Repaired | None:
    """The value that is meant by `text`, which is not JSON; None when that cannot be told."""
    if len(text) > MOST_REPAIRED:
        return None
    pieces: Sequence[_Piece] | None = _pieces(_trim(text))
    if pieces is None:
        return None
    written = text
    names: tuple[str, ...] = ()
    for name, repair in REPAIRS:
        pieces = repair(pieces)
        before, written = written, _joined(pieces)
        if written == before:
            continue
        names = (*names, name)
        try:
            return Repaired(loads(written), names)
        except NotJSON:
            continue
    return _last_resort(pieces, names)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of almost-JSON. quote: by which a string opens, and `body` is what is in it, as written."""

    kind: Literal["text", "string", "comment"]
    body: str
    quote: str = ""


def _pieces(text: str) -> list[_Piece] | None:
    """`text` cut into strings, comments and what is between; None when a string, comment or bracket is not closed."""
    found: list[_Piece] = []
    brackets: list[str] = []
    at = start = 0
    while at < len(text):
        special = OPENERS.get(text[at]) or ("#" if text.startswith(("//", "/*"), at) else "")
        if not special:
            if text[at] in "{[":
                brackets.append("}" if text[at] == "{" else "]")
            elif text[at] in "}]" and (not brackets or brackets.pop() != text[at]):
                return None
            at += 1
            continue
        end = _comment_end(text, at) if special == "#" else _string_end(text, at, special)
        if end < 0:
            return None
        found.append(_Piece("text", text[start:at]))
        found.append(_Piece("comment", text[at:end]) if special == "#" else _Piece("string", text[at + 1 : end - 1], text[at]))
        at = start = end
    return None if brackets else [*found, _Piece("text", text[start:])]


def _string_end(text: str, at: int, closers: str) -> int:
    """Behind the quotation mark that closes the string which opens at `at`. One that is no `"` must look like an end, as it may be an
    apostrophe."""
    for match in re.finditer(rf"\\.|[{closers}]", text[at + 1 :], re.DOTALL):
        end = at + 1 + match.end()
        if match[0][0] != "\\" and (text[at] == '"' or BEHIND_STRING.match(text, end)):
            return end
    return -1


def _comment_end(text: str, at: int) -> int:
    if text[at + 1] == "/":
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    end = text.find("*/", at + 2)
    return end if end < 0 else end + 2


def _joined(pieces: Sequence[_Piece]) -> str:
    return "".join(f"{piece.quote}{piece.body}{OPENERS[piece.quote][0]}" if piece.quote else piece.body for piece in pieces)


def _on(kind: str, change: Callable[[_Piece], _Piece]) -> Callable[[Sequence[_Piece]], list[_Piece]]:
    return lambda pieces: [change(piece) if piece.kind == kind else piece for piece in pieces]


def _trim(text: str) -> str:
    """Without whitespace and a code fence around it."""
    text = text.strip()
    fenced = FENCE.match(text)
    return fenced[1].strip() if fenced else text


def _python_literals(piece: _Piece) -> _Piece:
    return replace(piece, body=LITERAL.sub(lambda found: LITERALS[found[0]], piece.body))


def _without_comments(pieces: Sequence[_Piece]) -> list[_Piece]:
    """No comments, and no comma behind the last member."""
    kept: list[_Piece] = []
    for is_text, group in groupby((piece for piece in pieces if piece.kind != "comment"), lambda piece: piece.kind == "text"):
        run = list(group)
        kept += [_Piece("text", TRAILING_COMMA.sub(r"\1", "".join(piece.body for piece in run)))] if is_text else run
    return kept


def _single_quotes(piece: _Piece) -> _Piece:
    return replace(piece, body=_as_json_body(piece.body), quote='"') if piece.quote == "'" else piece


def _raw_controls(piece: _Piece) -> _Piece:
    return replace(piece, body=RAW_CONTROL.sub(lambda found: dumps(found[0])[1:-1], piece.body))


def _backslashes(piece: _Piece) -> _Piece:
    """A string whose backslashes all stand before letters that they cannot escape is a path."""
    escapes = set(re.findall(r"\\(.)", piece.body))
    is_path = piece.quote == '"' and escapes and not escapes & set('"\\/bfnrtu')
    return replace(piece, body=piece.body.replace("\\", "\\\\")) if is_path else piece


def _typographic_quotes(pieces: Sequence[_Piece]) -> list[_Piece]:
    """CJK and curly quotation marks, colons and commas, where they stand for JSON's own."""
    return [
        replace(piece, body=piece.body.replace("：", ":").replace("，", ","))
        if piece.kind == "text"
        else replace(piece, body=_as_json_body(piece.body), quote='"')
        if piece.quote not in ('"', "'", "")
        else piece
        for piece in pieces
    ]


def _as_json_body(body: str) -> str:
    """The inside of a string that was in other quotation marks: `\\'` is an apostrophe, `"` needs an escape."""
    return re.sub(r"\\.|\"", lambda found: {"\\'": "'", '"': '\\"'}.get(found[0], found[0]), body, flags=re.DOTALL)


REPAIRS: tuple[tuple[str, Callable[[Sequence[_Piece]], list[_Piece]]], ...] = (
    ("trim", list),
    ("python literals", _on("text", _python_literals)),
    ("comments and trailing commas", _without_comments),
    ("single quotes", _on("string", _single_quotes)),
    ("raw control characters", _on("string", _raw_controls)),
    ("typographic quotes", _typographic_quotes),
    ("backslashes", _on("string", _backslashes)),
)


def _last_resort(pieces: Sequence[_Piece], names: tuple[str, ...]) -> Repaired | None:
    import json_repair

    if any(NO_VALUE.search(piece.body) if piece.kind == "text" else BAD_ESCAPE.search(piece.body) for piece in pieces):
        return None  # json-repair would put "" there, or read some backslashes as escapes and others not
    text = _joined(pieces)
    try:
        value = json_repair.loads(text, skip_json_loads=True)
        written = dumps(value)
        again = loads(written)
    except Exception:  # another's parser over text of any kind: whatever it raises, the text is not repaired
        return None
    if isinstance(again, str) or _letters(written) != _letters(text):
        return None
    return Repaired(again, (*names, "json-repair"))


def _letters(text: str) -> Counter[str]:
    return Counter(WORD.findall(text))
