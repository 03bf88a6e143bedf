"""What llama.cpp makes of a grammar: whether a text follows it, and texts that do, drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from a3b_gguf.llama.candidates import Candidates
from a3b_gguf.llama.grammar import GrammarState
from a3b_gguf.llama.sampling import Grammar
from a3b_gguf.llama.vocab import Vocab

ENDS = ("\n</parameter>\n", "</function>\n</tool_call>", "</think>", '"', "}", "]", '"}', '"]')  # what free text must come to


class Texts:
    """Owns the candidates of one vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab, self._candidates = vocab, Candidates(vocab.n_tokens)
        # Tokens that are whole characters; one that ends the text is not a part of it.
        self._whole = [t for t in range(vocab.n_tokens) if "\ufffd" not in vocab.piece(t).decode(errors="replace") and not vocab.is_eog(t)]
        self._ends = [vocab.tokenize(text, True) for text in ENDS]

    @contextmanager
    def _state(self, grammar: str) -> Iterator[GrammarState]:
        state = GrammarState(Grammar(grammar), self.vocab)
        try:
            yield state
        finally:
            state.close()

    def follows(self, grammar: str, text: str) -> bool:
        """Whether `text` is a whole text of the grammar."""
        with self._state(grammar) as state:
            for token in [*self.vocab.tokenize(text, True), self.vocab.eos]:
                if not state.allows(token, self._candidates):
                    return False
                if token != self.vocab.eos:
                    state.accept(token, self._candidates)
        return True

    def drawn(self, grammar: str, seed: int, most: int = 150) -> str | None:
        """A text of the grammar; None when it did not come to its end within `most` steps."""
        random = np.random.default_rng(seed)
        found = b""
        with self._state(grammar) as state:
            for _ in range(most):
                if state.allows(self.vocab.eos, self._candidates) and random.random() < 0.5:
                    return found.decode()
                for token in self._next(state, random):
                    found += self.vocab.piece(token)
        return None

    def _next(self, state: GrammarState, random: np.random.Generator) -> Iterator[int]:
        """Further tokens, accepted already: now and then an end of free text, else one at random."""
        wanted = self._ends[random.integers(len(ENDS))] if random.random() < 0.4 else [int(random.choice(self._whole))]
        for count, token in enumerate(wanted):
            if not state.allows(token, self._candidates):
                if count == 0:
                    yield from self._any(state, random)
                return
            state.accept(token, self._candidates)
            yield token

    def _any(self, state: GrammarState, random: np.random.Generator) -> Iterator[int]:
        logits = np.full(self.vocab.n_tokens, -np.inf, np.float32)
        logits[self._whole] = random.random(len(self._whole), np.float32)
        self._candidates.fill(logits)
        state.restrict(self._candidates)
        rows = self._candidates._rows
        token = int(rows["id"][rows["logit"].argmax()])
        if not self.vocab.is_eog(token) and self._candidates.any_left:
            state.accept(token, self._candidates)
            yield token
