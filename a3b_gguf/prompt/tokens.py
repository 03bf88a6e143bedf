"""A rendered prompt to tokens, in a way that no text of the request can become a control token.

llama.cpp first cuts a text at its special tokens, then tokenizes what is between them, piece by piece (llama-vocab.cpp,
tokenizer_st_partition). The same is done here, but only the template's own control texts cut; a piece may hold text of both, so that merges
across the border between them are those of the plain tokenization. `parse_special` off stops CONTROL tokens only: USER_DEFINED ones
(`<think>`, `<tool_call>` in this family) are matched anyway, so a piece is cut inside each of them.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from a3b_gguf.prompt.apart import FIX, NotApart, Rendered
from a3b_gguf.prompt.view import any_of

Fragment = tuple[int, int, int | None]  # characters [start, stop) of the prompt, and the control token that they are


class Vocabulary(Protocol):
    """What tokenizing asks of a model; `a3b_gguf.llama.vocab.Vocab` is one."""

    @property
    def bos(self) -> int: ...
    @property
    def add_bos(self) -> bool: ...
    def tokenize(self, text: str, parse_special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """ids: of each control text that is one token. everywhere: finds those that llama.cpp also matches with parse_special off."""

    ids: Mapping[str, int]
    pattern: re.Pattern[str] | None
    everywhere: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class Border:
    """Where a turn begins. token: how many tokens stand before it. role: "" when the prompt does not say it in ChatML's way."""

    token: int
    char: int
    role: str


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """tokens: what the engine gets, with BOS where the model wants one. borders: of every turn, the last one is the answer's.
    n_kept_as_text: places where the request wrote a control text that became ordinary tokens."""

    tokens: tuple[int, ...]
    borders: tuple[Border, ...]
    n_kept_as_text: int

    @property
    def marks(self) -> tuple[int, ...]:
        """Token counts at which a later request is likely to part from this one: the end of the system turn, each opener of an answer."""
        after_system = {self.borders[1].token} if len(self.borders) > 1 and self.borders[0].role == "system" else set()
        return tuple(sorted(after_system | {border.token for border in self.borders if border.role == "assistant"}))


def control_tokens(texts: Sequence[str], vocabulary: Vocabulary) -> ControlTokens:
    """Looks the texts up, once per model: `texts` are those of the profile. Texts that are no single token are left out."""
    found = {text: ids[0] for text in texts if len(ids := vocabulary.tokenize(text, True)) == 1}
    everywhere = tuple(text for text, token in found.items() if len(text) > 1 and vocabulary.tokenize(text, False) == [token])
    return ControlTokens(found, any_of(tuple(found)), any_of(everywhere))


def tokenize_rendered(
    rendered: Rendered, vocabulary: Vocabulary, controls: ControlTokens, turn_starts: Sequence[str] = ("<|im_start|>",)
) -> TokenizedPrompt:
    """The tokens of a prompt. turn_starts: the control texts that open a turn (Profile.turn_starts).

    Equal to tokenizing the text whole when the request wrote nothing that looks like a control token. Raises NotApart when a vocabulary
    cannot keep such a text as text; BadInput for half of a surrogate pair.
    """
    fragments = list(_fragments(rendered, controls))
    if not rendered.foreign:
        tokens = vocabulary.tokenize(rendered.text, True)
        starts = {controls.ids[text] for text in turn_starts if text in controls.ids}
        places = [index for index, token in enumerate(tokens) if token in starts]
    else:
        tokens, places = [], []
        for start, stop, control in fragments:
            if control is None:
                tokens += _as_text(rendered.text[start:stop], vocabulary, controls)
                continue
            if rendered.text[start:stop] in turn_starts:
                places.append(len(tokens))
            tokens.append(control)
    chars = [start for start, stop, control in fragments if control is not None and rendered.text[start:stop] in turn_starts]
    shift = int(vocabulary.add_bos and tokens[:1] != [vocabulary.bos])
    if shift:
        tokens.insert(0, vocabulary.bos)
    borders = tuple(
        Border(place + shift, char, _role(rendered.text, char, turn_starts)) for place, char in zip(places, chars, strict=False)
    )
    kept = sum(len(controls.pattern.findall(rendered.text, *span)) for span in rendered.foreign) if controls.pattern else 0
    return TokenizedPrompt(tuple(tokens), borders, kept)


def _fragments(rendered: Rendered, controls: ControlTokens) -> Iterator[Fragment]:
    """The prompt cut at the template's own control texts."""
    at = 0
    for start, stop in _own(rendered):
        for match in controls.pattern.finditer(rendered.text, start, stop) if controls.pattern else ():
            if match.start() > at:
                yield at, match.start(), None
            yield match.start(), match.end(), controls.ids[match[0]]
            at = match.end()
    if at < len(rendered.text):
        yield at, len(rendered.text), None


def _own(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Stretches of the prompt that are not foreign."""
    at = 0
    for start, stop in rendered.foreign:
        yield at, start
        at = stop
    yield at, len(rendered.text)


def _as_text(text: str, vocabulary: Vocabulary, controls: ControlTokens) -> list[int]:
    if controls.everywhere is None or not controls.everywhere.search(text):
        return vocabulary.tokenize(text, False)
    tokens: list[int] = []
    at = 0
    while match := controls.everywhere.search(text, at):
        tokens += vocabulary.tokenize(text[at : match.start() + 1], False)
        at = match.start() + 1
    tokens += vocabulary.tokenize(text[at:], False)
    if b"".join(map(vocabulary.piece, tokens)) != text.encode():  # a vocabulary that puts a space before each piece
        raise NotApart("the vocabulary cannot keep a control text of the request as text", FIX)
    return tokens


def _role(text: str, char: int, turn_starts: Sequence[str]) -> str:
    opener = next(start for start in turn_starts if text.startswith(start, char))
    inside = re.match(r"<\|(system|user|assistant)\|>$", opener)
    if inside:
        return inside[1]
    word = re.compile(r"[a-z]+").match(text, char + len(opener))
    return word[0] if word else ""


def borders_of_ids(
    ids: Sequence[int], vocabulary: Vocabulary, controls: ControlTokens, turn_starts: Sequence[str], n_tokens: int
) -> tuple[Border, ...]:
    """The turns of a prompt of which only the ids are known. char is not known and 0."""
    starts = {controls.ids[text]: text for text in turn_starts if text in controls.ids}
    borders = []
    for index, token in enumerate(ids):
        if token in starts:
            behind = b"".join(vocabulary.piece(found) for found in ids[index + 1 : index + 5] if 0 <= found < n_tokens)
            borders.append(Border(index, 0, _role(starts[token] + behind.decode("utf-8", "replace"), 0, turn_starts)))
    return tuple(borders)


def spans_of_tokens(tokens: Sequence[int], vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """Bytes [start, stop) of each token in the text that they spell; a token outside of the vocabulary spells nothing."""
    ends: list[int] = []
    for token in tokens:
        ends.append((ends[-1] if ends else 0) + len(vocabulary.piece(token)))
    return list(zip([0, *ends], ends, strict=False))


def turn_of(borders: Sequence[Border], index: int) -> int:
    """The number of the turn that token `index` belongs to, from 0; -1 before the first."""
    return bisect.bisect_right(borders, index, key=lambda border: border.token) - 1
