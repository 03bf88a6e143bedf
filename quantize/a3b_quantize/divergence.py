"""How far the next-token distributions of a model are from those of its base, position by position.

Formulas: `log_softmax` and `kl_divergence` in tools/perplexity/perplexity.cpp of llama.cpp. Logits are float32, sums are float64.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Tokens that the base finds less likely than e^-16 (1e-7) do not count, as in llama.cpp.
LEAST_LOG_P = -16.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BaseRows:
    """What the base says at n positions. nll: minus log p of the token that followed, float32 [n]; top: its first choice, int32 [n].

    Tokens of the positions one behind the other: counts int32 [n] of them each; tokens int32, log_p float32, both [sum of counts].
    """

    nll: NDArray[np.float32]
    top: NDArray[np.int32]
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    log_p: NDArray[np.float32]

    def part(self, start: int, stop: int) -> BaseRows:
        """Positions start..stop."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        inner = slice(ends[start], ends[stop])
        outer = slice(start, stop)
        return BaseRows(self.nll[outer], self.top[outer], self.counts[outer], self.tokens[inner], self.log_p[inner])


@dataclass(frozen=True, slots=True)
class Compared:
    """A model against its base at n positions, each array [n]. p_change: probability of the token that followed, the model's minus the
    base's; same_top: whether both have the same first choice."""

    nll: Floats
    base_nll: Floats
    kl: Floats
    p_change: Floats
    same_top: NDArray[np.bool_]


def log_sums(logits: NDArray[np.float32]) -> Floats:
    """log of the sum of exp over each row: float64 [n]."""
    largest = logits.max(axis=1)
    sums = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    found: Floats = largest.astype(np.float64) + np.log(sums)
    return found


def negative_log_p(logits: NDArray[np.float32], following: NDArray[np.int32]) -> Floats:
    """Minus log p of the token that followed, float64 [n]. logits: float32 [n, n_vocab]; following: int32 [n]."""
    found: Floats = log_sums(logits) - logits[np.arange(len(logits)), following]
    return found


def base_rows(logits: NDArray[np.float32], following: NDArray[np.int32]) -> BaseRows:
    """What is kept of a base's logits."""
    sums = log_sums(logits)
    kept = logits > (sums + LEAST_LOG_P)[:, None].astype(np.float32)
    rows, tokens = np.nonzero(kept)
    log_p = (logits[rows, tokens] - sums[rows]).astype(np.float32)
    nll = (sums - logits[np.arange(len(logits)), following]).astype(np.float32)
    counts = kept.sum(axis=1, dtype=np.int32)
    return BaseRows(nll, logits.argmax(axis=1).astype(np.int32), counts, tokens.astype(np.int32), log_p)


def compare(logits: NDArray[np.float32], following: NDArray[np.int32], base: BaseRows) -> Compared:
    """The model's logits against the same positions of its base."""
    n = len(logits)
    sums = log_sums(logits)
    nll = sums - logits[np.arange(n), following]
    rows = np.repeat(np.arange(n), base.counts)
    log_ratio = base.log_p - (logits[rows, base.tokens] - sums[rows])
    terms = np.exp(base.log_p.astype(np.float64)) * log_ratio
    starts = np.concatenate([[0], np.cumsum(base.counts)[:-1]]).astype(np.intp)
    kl = np.add.reduceat(terms, starts)  # no position is empty: the likeliest token of n_vocab has p of at least 1/n_vocab
    base_nll = base.nll.astype(np.float64)
    return Compared(nll, base_nll, kl, np.exp(-nll) - np.exp(-base_nll), logits.argmax(axis=1) == base.top)


def in_threads(pool: Executor, n_parts: int, function: Any, n_rows: int) -> list[Any]:
    """`function(start, stop)` over even parts of `n_rows`, in order. numpy frees the GIL in the parts that take time."""
    edges = [n_rows * i // n_parts for i in range(n_parts + 1)]
    pairs = [(a, b) for a, b in pairwise(edges) if b > a]
    return list(pool.map(lambda pair: function(*pair), pairs))


def joined(parts: list[Any]) -> Any:
    """Values of one dataclass of arrays as one of them."""
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, name) for part in parts]) for name in kind.__dataclass_fields__))
