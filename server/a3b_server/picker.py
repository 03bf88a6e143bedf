"""Chooses the tokens of one request from rows of logits, and says how likely they were."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.candidates import Candidates
from a3b_gguf.llama.grammar import GrammarState
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.sampler import Sampler
from a3b_gguf.llama.vocab import Vocab
from a3b_server.messages import Submit, TokenLogprobs


class NotNumbers(Exception):
    """A row of logits holds NaN: the model's file is damaged, or its computation overflowed."""


class GrammarEnded(Exception):
    """The grammar allows no token, or what was written before it took hold does not fit to it."""


class Picker:
    """Owns the sampler and the grammar of one request. Raises UsageError for a grammar that cannot be read."""

    def __init__(self, request: Submit, vocab: Vocab, candidates: Candidates, n_ctx: int) -> None:
        sampling = request.sampling
        self._sampling, self._vocab, self._candidates = sampling, vocab, candidates
        self._grammar = GrammarState(sampling.grammar, vocab) if sampling.grammar else None
        self._sampler = None if sampling.is_argmax else Sampler(sampling, vocab, n_ctx)
        if self._sampler is not None:
            self._sampler.remember(request.tokens)

    def pick(self, context: Context, row: int, row_logits: NDArray[np.float32]) -> int:
        """The next token, which is remembered as accepted. row_logits: float32 [n_vocab], of row `row` of the last batch."""
        if self._sampler is None:
            token = int(row_logits.argmax())
            if self._sampling.ignore_eos and self._vocab.is_eog(token):
                row_logits = row_logits.copy()  # the row itself may be asked for its probabilities
                row_logits[list(self._vocab.eog_tokens)] = -math.inf
                token = int(row_logits.argmax())
            if not math.isfinite(row_logits[token]):
                raise NotNumbers
            return token
        if not math.isfinite(row_logits.max()):
            raise NotNumbers
        if self._grammar is None:
            return self._sampler.sample(context, row)
        return self._pick_allowed(self._sampler, self._grammar, row_logits)

    def _pick_allowed(self, sampler: Sampler, grammar: GrammarState, row_logits: NDArray[np.float32]) -> int:
        """Draws freely, and among what the grammar allows only when it refuses."""
        self._candidates.fill(row_logits)
        token = sampler.choose(self._candidates)
        if not grammar.allows(token, self._candidates):
            self._candidates.fill(row_logits)
            if self._sampling.ignore_eos:
                self._candidates.forbid(np.array(self._vocab.eog_tokens))
            grammar.restrict(self._candidates)
            if not self._candidates.any_left:
                raise GrammarEnded("the grammar allows nothing more")
            token = sampler.choose(self._candidates)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Goes on by a token that was drawn, which the grammar allows."""
        if self._sampler is not None:
            self._sampler.accept(token)
        if self._grammar is not None and not self._grammar.accept(token, self._candidates):
            raise GrammarEnded("what was written when the grammar took hold does not fit to it")

    def write(self, token: int) -> None:
        """Goes on by a token that the engine wrote; where the grammar does not allow it, it is none of the grammar's."""
        if self._grammar is None or self._grammar.allows(token, self._candidates):
            self.accept(token)
        elif self._sampler is not None:
            self._sampler.accept(token)

    def close(self) -> None:
        for owned in (self._sampler, self._grammar):
            if owned is not None:
                owned.close()


def logprobs(row_logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Log of softmax over all tokens, of `token` and of the n_top likeliest."""
    largest = float(row_logits.max())
    total = largest + math.log(float(np.exp(row_logits - largest, dtype=np.float32).sum(dtype=np.float64)))
    if n_top:
        likeliest = np.argpartition(row_logits, -n_top)[-n_top:]
        likeliest = likeliest[np.argsort(-row_logits[likeliest], kind="stable")]
    else:
        likeliest = np.zeros(0, np.int64)
    return TokenLogprobs(float(row_logits[token]) - total, tuple((int(one), float(row_logits[one]) - total) for one in likeliest))
