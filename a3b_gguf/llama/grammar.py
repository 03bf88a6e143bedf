"""Answers that follow a grammar: the one token that was drawn is tested, and the whole vocabulary only after a refusal.

Testing every token of the vocabulary at each step, as a grammar inside a sampler chain does, costs tens of milliseconds a token.
llama.cpp ends the process for a token that a grammar does not allow and for a trigger that is no regular expression, so neither
gets through here; triggers are matched in Python, since C++'s regular expressions overflow the stack on long texts.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.candidates import Candidates
from a3b_gguf.llama.sampling import Grammar
from a3b_gguf.llama.vocab import Vocab

MOST_CHARACTERS, MOST_NESTED = 1 << 20, 100  # the parser calls itself for every bracket
ANYTHING = ("[\\s\\S]*?", "[\\S\\s]*?", "(?:[\\s\\S]*?)")  # a beginning that a search makes needless, and that makes it slow


def check_grammar(vocab: Vocab, grammar: Grammar) -> str | None:
    """What is wrong with a grammar, in one sentence; None when it can be used. llama.cpp writes the place to standard error."""
    try:
        _triggers(grammar.triggers)
        C.llama_sampler_free(_parsed(vocab, grammar))
    except UsageError as error:
        return error.message
    return None


class GrammarState:
    """Owns a grammar and where an answer stands in it. Before one of its triggers was written it allows everything."""

    def __init__(self, grammar: Grammar, vocab: Vocab) -> None:
        """Raises UsageError for a grammar that llama.cpp cannot read."""
        self._vocab, self._triggers, self._said = vocab, _triggers(grammar.triggers), bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pointer: Any = _parsed(vocab, grammar)

    @property
    def is_awake(self) -> bool:
        """Whether it holds already."""
        return not self._triggers

    def allows(self, token: int, candidates: Candidates) -> bool:
        candidates.fill_one(token)
        self.restrict(candidates)
        return candidates.any_left

    def restrict(self, candidates: Candidates) -> None:
        """Refuses all tokens that must not come next. When the grammar is at its end, only those that end a generation are left."""
        if self.is_awake:
            candidates.apply(self._pointer)

    def accept(self, token: int, candidates: Candidates) -> bool:
        """Goes on by one token, which must be allowed. False: what triggered the grammar does not fit to it."""
        if self.is_awake:
            C.llama_sampler_accept(self._pointer, token)
            return True
        self._said += self._vocab.piece(token)
        self._decoder.decode(self._vocab.piece(token))
        if self._decoder.getstate()[0]:  # in the middle of a character
            return True
        text = self._said.decode("latin-1")  # a character a byte, so that places are places
        start = min((at for pattern in self._triggers if (at := _found(pattern, text)) is not None), default=None)
        return start is None or self._wake(bytes(self._said[start:]), candidates)

    def _wake(self, written: bytes, candidates: Candidates) -> bool:
        """Feeds the grammar what was written already. It reads letters, so other tokens of the same letters will do."""
        self._triggers = ()
        self._said.clear()
        for token in self._vocab.tokenize(written.decode(errors="replace"), False):
            if not self.allows(token, candidates):
                return False
            C.llama_sampler_accept(self._pointer, token)
        return True

    def close(self) -> None:
        if self._pointer:
            C.llama_sampler_free(self._pointer)
            self._pointer = None


def _parsed(vocab: Vocab, grammar: Grammar) -> Any:
    depth, deepest = 0, 0
    for letter in grammar.text:
        depth += (letter == "(") - (letter == ")")
        deepest = max(deepest, depth)
    if len(grammar.text) > MOST_CHARACTERS or deepest > MOST_NESTED:
        raise UsageError(f"the grammar is too large: at most {MOST_CHARACTERS:,} characters and {MOST_NESTED} brackets in each other")
    if "\0" in grammar.text + grammar.root:
        raise UsageError("the grammar holds a NUL character")
    pointer = C.llama_sampler_init_grammar(vocab.pointer, grammar.text.encode(), grammar.root.encode())
    if not pointer:  # a NULL pointer object, not None
        raise UsageError(f"the grammar cannot be read, or has no rule {grammar.root!r}")
    return pointer


def _triggers(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    found = []
    for pattern in patterns:
        rest = next((pattern.removeprefix(start) for start in ANYTHING if pattern.startswith(start)), pattern)
        try:
            found.append(re.compile(rest.encode().decode("latin-1")))
        except re.error as error:
            raise UsageError(f"the grammar's trigger {pattern!r} is no regular expression: {error}") from error
    return tuple(found)


def _found(pattern: re.Pattern[str], text: str) -> int | None:
    """Where the grammar begins: at the first group that matched something, else at the match. As llama_grammar_trigger_pattern::find."""
    anchored = pattern.pattern.startswith("^") and pattern.pattern.endswith("$")
    match = (pattern.fullmatch(text) if anchored else None) or pattern.search(text)
    if match is None:
        return None
    return next((match.start(i) for i in range(1, 1 + pattern.groups) if match[i]), match.start())
