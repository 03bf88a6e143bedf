"""Draws a token from logits with llama.cpp's samplers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import llama_cpp.llama_cpp as C

from a3b_gguf.llama.candidates import Candidates
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.sampling import Sampling
from a3b_gguf.llama.vocab import Vocab

BITS_32 = 0xFFFF_FFFF
NEVER = 1e-30  # of the likeliest token's probability: what is below is not drawn in a lifetime


class Sampler:
    """Owns a chain: bias, penalties, DRY, top_k, typical_p, top_p, min_p, XTC, temperature, then a draw: llama-server's default order.

    Steps that would change nothing are left out. Equal seeds, logits and tokens before give equal tokens. n_ctx: the most tokens that
    a step can look back at. Grammars are no part of it: `grammar.GrammarState`.
    """

    def __init__(self, sampling: Sampling, vocab: Vocab, n_ctx: int) -> None:
        self._looks_back = max(_looks_back(sampling, n_ctx))
        self._chain: Any = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        for step in (*_changes(sampling, vocab, n_ctx), *_draw(sampling)):
            C.llama_sampler_chain_add(self._chain, step)  # the chain frees its steps

    def remember(self, tokens: Sequence[int]) -> None:
        """Tokens before the first drawn one, the prompt: penalties count them too."""
        if self._looks_back:
            for token in tokens[-self._looks_back :]:
                self.accept(token)

    def sample(self, context: Context, row: int) -> int:
        """Draws from the logits of a row of the last batch, and remembers the token as accepted."""
        return int(C.llama_sampler_sample(self._chain, context.pointer, row))

    def choose(self, candidates: Candidates) -> int:
        """Draws from candidates and forgets it again; `accept` what is kept."""
        candidates.apply(self._chain)
        return candidates.selected

    def accept(self, token: int) -> None:
        C.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        if self._chain:
            C.llama_sampler_free(self._chain)
            self._chain = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _looks_back(sampling: Sampling, n_ctx: int) -> tuple[int, int]:
    """Tokens that the penalties and DRY look back at; llama.cpp takes -1 for none, where people mean all, and takes memory for the rest."""
    penalties, dry = (min(n, n_ctx) if n >= 0 else n_ctx for n in (sampling.penalty_last_n, sampling.dry_penalty_last_n))
    return penalties if sampling.has_penalties else 0, dry if sampling.dry_multiplier else 0


def _changes(sampling: Sampling, vocab: Vocab, n_ctx: int) -> Iterator[Any]:
    """Steps that change logits, whether the draw is random or not."""
    bias = [*sampling.logit_bias, *((token, -float("inf")) for token in (vocab.eog_tokens if sampling.ignore_eos else ()))]
    if bias:
        array = (C.llama_logit_bias * len(bias))(*bias)  # copied by the call
        yield C.llama_sampler_init_logit_bias(vocab.n_tokens, len(bias), array)
    n_penalties, n_dry = _looks_back(sampling, n_ctx)
    if n_penalties:
        yield C.llama_sampler_init_penalties(
            vocab.n_tokens, n_penalties, sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        )
    if n_dry:
        breakers = [breaker.encode() for breaker in sampling.dry_breakers]
        words = (ctypes.c_char_p * len(breakers))(*breakers)
        yield C.llama_sampler_init_dry(
            vocab.pointer, sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, n_dry, words, len(breakers)
        )


def _draw(sampling: Sampling) -> Iterator[Any]:
    if sampling.is_greedy:
        yield C.llama_sampler_init_greedy()
        return
    if sampling.top_k > 0:
        yield C.llama_sampler_init_top_k(sampling.top_k)
    if sampling.typical_p < 1:
        yield C.llama_sampler_init_min_p(NEVER, 1)  # a token of probability 0 makes the entropy NaN and the choice arbitrary
        yield C.llama_sampler_init_typical(sampling.typical_p, 1)
    if sampling.top_p < 1:
        yield C.llama_sampler_init_top_p(sampling.top_p, 1)
    if sampling.min_p > 0:
        yield C.llama_sampler_init_min_p(sampling.min_p, 1)
    if sampling.xtc_probability > 0:
        yield C.llama_sampler_init_xtc(sampling.xtc_probability, sampling.xtc_threshold, 1, sampling.seed & BITS_32)
    yield C.llama_sampler_init_temp(sampling.temperature)
    yield C.llama_sampler_init_dist(sampling.seed & BITS_32)
