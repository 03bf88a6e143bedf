"""Numbers with their uncertainty: standard errors as llama-perplexity prints them, and 95 % intervals that allow for chunks of text.

Positions of one chunk are alike (an easy paragraph, a table), so the interval takes chunks as the independent observations, with
Student's t for their number; with fewer than 4 chunks it is 1.96 standard errors. Quantiles: ranks, from the binomial distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, floor, sqrt

import numpy as np
from numpy.typing import NDArray

Z = 1.959964  # 97.5 % of the normal distribution
LEAST_CHUNKS = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """value; stderr: llama-perplexity's ±, positions taken as independent, None where it prints none; low, high: 95 % interval."""

    value: float
    stderr: float | None
    low: float
    high: float


def mean(values: Floats, scale: float = 1.0) -> Estimate:
    """Mean of values [n_chunk, n], times `scale`."""
    n = values.size
    average = float(values.mean())
    stderr = float(sqrt(max(float((values * values).mean()) - average * average, 0.0) / max(n - 1, 1)))
    half = _t_half(values, average, stderr)
    return Estimate(scale * average, scale * stderr, scale * (average - half), scale * (average + half))


def exp_mean(values: Floats) -> Estimate:
    """exp of the mean: a perplexity from negative log likelihoods, a ratio of two from their differences."""
    inner = mean(values)
    value = exp(inner.value)
    return Estimate(value, value * (inner.stderr or 0.0), exp(inner.low), exp(inner.high))


def root_mean_square(values: Floats, scale: float = 1.0) -> Estimate:
    """Root of the mean of squares of values [n_chunk, n], times `scale`."""
    inner = mean(values * values)
    value = sqrt(inner.value)
    stderr = 0.5 / value * (inner.stderr or 0.0) if value else 0.0
    return Estimate(scale * value, scale * stderr, scale * sqrt(max(inner.low, 0.0)), scale * sqrt(inner.high))


def quantile(values: Floats, fraction: float) -> Estimate:
    """A quantile, interpolated as llama-perplexity does. The interval: order statistics whose ranks hold it with 95 %."""
    ordered = np.sort(values, axis=None)
    n = len(ordered)
    at = fraction * (n - 1)
    below = int(at)
    value = (1 - (at - below)) * ordered[below] + (at - below) * ordered[min(below + 1, n - 1)]
    spread = Z * sqrt(n * fraction * (1 - fraction))
    low, high = max(floor(n * fraction - spread), 0), min(ceil(n * fraction + spread), n - 1)
    return Estimate(float(value), None, float(ordered[low]), float(ordered[high]))


def maximum(values: Floats) -> Estimate:
    """The largest of n. No interval reaches beyond what was seen: with 95 % at most 3 of n positions of other text lie above it."""
    largest = float(values.max())
    return Estimate(largest, None, largest, largest)


def _t_half(values: Floats, average: float, stderr: float) -> float:
    """Half the width of the 95 % interval of a mean over values [n_chunk, n]."""
    n_chunk = values.shape[0]
    if n_chunk < LEAST_CHUNKS:
        return Z * stderr
    of_chunks = values.mean(axis=1) - average
    return _t(n_chunk - 1) * sqrt(float((of_chunks * of_chunks).sum()) / (n_chunk * (n_chunk - 1)))


def _t(freedom: int) -> float:
    """97.5 % of Student's t, to 1 % from 3 degrees on. Source: expansion 26.7.5 of Abramowitz and Stegun."""
    z = Z
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
