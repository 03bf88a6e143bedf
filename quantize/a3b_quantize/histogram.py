"""A sketch of many activations: exact extremes and counts, percentiles within 1.6 %, mergeable in any order.

The bins are logarithmic: 32 to an octave from 2^-32 to 2^32, found by shifting the bits of a float32. A percentile is the middle
of the bin that holds it, and a bin is at most 1/32 of its lower edge wide: off by at most 1/64 of the value. Smaller magnitudes
count as zero, larger ones fall into the last bin; `absmax` is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MANTISSA_BITS = 5
SHIFT = 23 - MANTISSA_BITS
LOWEST = (127 - 32) << MANTISSA_BITS  # the shifted bits of 2^-32
N_BINS = (64 << MANTISSA_BITS) + 1  # bin 0: zero and everything below 2^-32
MAX_ERROR = 2.0 ** -(MANTISSA_BITS + 1)
GROUP = 32  # values of a Q8_1 block, whose sum is kept in F16


class Histogram:
    """Owns the bins. count: finite values; non_finite: the others, which are in no other number; sum32: largest |sum over 32|."""

    __slots__ = ("absmax", "bins", "non_finite", "sum32")

    def __init__(self) -> None:
        self.bins = np.zeros(N_BINS, np.int64)
        self.non_finite = 0
        self.absmax = 0.0
        self.sum32 = 0.0

    @property
    def count(self) -> int:
        return int(self.bins.sum())

    def add(self, values: NDArray[np.float32]) -> None:
        """Counts float32 values [..., channels]. Sums are taken over 32 neighbouring channels of a row, the last group may be short."""
        finite = np.isfinite(values)
        n_bad = int(values.size - np.count_nonzero(finite))
        if n_bad:
            self.non_finite += n_bad
            values = np.where(finite, values, np.float32(0))
        magnitude = np.abs(values)
        shifted = (np.ascontiguousarray(magnitude).reshape(-1).view(np.uint32) >> SHIFT).astype(np.int64)
        counted = np.bincount(np.clip(shifted - (LOWEST - 1), 0, N_BINS - 1), minlength=N_BINS)
        counted[0] -= n_bad
        self.bins += counted
        if magnitude.size:
            self.absmax = max(self.absmax, float(magnitude.max()))
            self.sum32 = max(self.sum32, _largest_sum(values))

    def merge(self, other: Histogram) -> None:
        """Adds what `other` has seen."""
        self.bins += other.bins
        self.non_finite += other.non_finite
        self.absmax = max(self.absmax, other.absmax)
        self.sum32 = max(self.sum32, other.sum32)

    def percentile(self, fraction: float) -> float:
        """The magnitude that `fraction` of the values do not exceed (numpy's method "inverted_cdf"), within MAX_ERROR; 0 when empty."""
        total = self.count
        if not total:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self.bins), np.ceil(fraction * total)))
        return min(_middle(index), self.absmax)


def _largest_sum(values: NDArray[np.float32]) -> float:
    """Largest |sum| over groups of 32 channels. In float64: the sum is what may overflow F16, not what may overflow here."""
    n_cols = values.shape[-1]
    rows = values.reshape(-1, n_cols)
    starts = np.arange(0, n_cols, GROUP)
    return float(np.abs(np.add.reduceat(rows, starts, axis=1, dtype=np.float64)).max())


def _middle(index: int) -> float:
    """The middle of a bin; bin 0 stands for zero."""
    if index == 0:
        return 0.0
    edges = np.array([index - 1, index], np.uint32) + np.uint32(LOWEST)
    low, high = (edges << np.uint32(SHIFT)).view(np.float32)
    return (float(low) + float(high)) / 2
