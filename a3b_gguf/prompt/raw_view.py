"""A rendered prompt cut into its turns, without forming an opinion: what is wrong with them is for the rules to say.

The form of a good one, for ChatML profiles and for those of Phi-3:

    turn+ generation?        turn = "<|im_start|>" role "\\n" body "<|im_end|>\\n"        generation = the profile's own
                             turn = "<|" role "|>\\n" body "<|end|>\\n"
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from a3b_gguf.errors import BadInput
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.prompt.view import SystemPolicy


@dataclass(frozen=True, slots=True)
class Turn:
    """start: of the opener. header: what stands between it and the end of its line. body_start, end: of the text; end is where the
    closer stands, or where an unclosed turn breaks off. after: behind the closer. All in characters."""

    start: int
    header: str
    body: str
    body_start: int
    end: int
    after: int
    closed: bool
    has_newline: bool

    @property
    def role(self) -> str:
        """The word that the header means: "system" also for " System:"."""
        return re.split(r"[^a-z]", self.header.strip(" \t\r:").lower(), maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class RawView:
    """strays: closers without an open turn. lines: where each line begins, in characters and in bytes."""

    text: str
    profile: Profile
    system: SystemPolicy
    turns: tuple[Turn, ...]
    strays: tuple[int, ...]
    lines: tuple[tuple[int, int], ...]
    complete: bool = False

    def place(self, at: int) -> tuple[str, int]:
        """`byte 17, line 3` of a character, and the byte alone."""
        number = bisect.bisect_right(self.lines, at, key=lambda line: line[0])
        start, offset = self.lines[number - 1]
        offset += at - start if self.text.isascii() else len(_bytes(self.text[start:at]))
        return f"byte {offset}, line {number}", offset

    def is_in_body(self, at: int) -> bool:
        """Whether a character is part of a turn's text."""
        index = bisect.bisect_right(self.turns, at, key=lambda turn: turn.body_start) - 1
        return index >= 0 and at < self.turns[index].end

    @property
    def closed_turns(self) -> tuple[Turn, ...]:
        """All but an answer that is left open at the end, which is the generation prompt."""
        return self.turns[:-1] if self.generation is not None else self.turns

    @property
    def generation(self) -> str | None:
        """What stands from the opener of an unclosed last turn of the assistant on; None when there is no such turn."""
        last = self.turns[-1] if self.turns else None
        if last is None or last.closed or last.role != "assistant":
            return None
        return self.text[last.start :]


PIPE_OPENERS = ("<|system|>", "<|user|>", "<|assistant|>")


def view_raw(text: str, profile: Profile, system: SystemPolicy = "optional", complete: bool = False) -> RawView:
    """`text` cut into turns. Raises BadInput when the profile's template writes neither ChatML's turns nor Phi-3's."""
    if not (profile.is_chatml or profile.is_pipes):
        raise BadInput(
            f"the chat template of {profile.name} does not write <|im_start|> turns, and raw prompts of other forms cannot be checked",
            "check the messages as JSON instead",
        )
    starts, end = (PIPE_OPENERS if profile.is_pipes else (profile.turn_start,)), profile.turn_end
    pattern = "|".join(map(re.escape, (*starts, end)))
    marks = [(match.start(), match[0]) for match in re.finditer(pattern, text)]
    turns: list[Turn] = []
    strays: list[int] = []
    opened: tuple[int, str] | None = None
    for at, mark in [*marks, (len(text), starts[0])]:
        if mark != end:
            if opened is not None:
                turns.append(_turn(text, opened, at, at, closed=False))
            opened = at, mark
        elif opened is None:
            strays.append(at)
        else:
            turns.append(_turn(text, opened, at, at + len(end), closed=True))
            opened = None
    return RawView(text, profile, system, tuple(turns), tuple(strays), tuple(_lines(text)), complete)


def _lines(text: str) -> Iterator[tuple[int, int]]:
    at = offset = 0
    for line in text.split("\n"):
        yield at, offset
        at += len(line) + 1
        offset += len(_bytes(line)) + 1


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _turn(text: str, opened: tuple[int, str], end: int, after: int, closed: bool) -> Turn:
    start, mark = opened
    inner = text[start + len(mark) : end]
    header, newline, body = inner.partition("\n")
    if mark in PIPE_OPENERS:
        header = mark[2:-2] + header
    return Turn(start, header, body, end - len(body), end, after, closed, bool(newline))
