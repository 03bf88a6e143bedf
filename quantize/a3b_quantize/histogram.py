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


class Histogram:
    """Owns the counts of one or several owners (the experts of a layer). What it says is of all of them together; see `part`.

    counts: int64 [owners, N_BINS + 1], the last column counts what is not finite; largest: float32 [owners], the largest magnitude;
    sums: float64 [owners], the largest |sum over 32 neighbouring channels|.
    """

    __slots__ = ("counts", "largest", "sums")

    def __init__(self, owners: int = 1) -> None:
        self.counts = np.zeros((owners, N_BINS + 1), np.int64)
        self.largest = np.zeros(owners, np.float32)
        self.sums = np.zeros(owners, np.float64)

    @property
    def bins(self) -> NDArray[np.int64]:
        """How many magnitudes fell into each bin, [N_BINS]."""
        summed: NDArray[np.int64] = self.counts[:, :-1].sum(axis=0)
        return summed

    @property
    def count(self) -> int:
        """Finite values."""
        return int(self.counts[:, :-1].sum())

    @property
    def non_finite(self) -> int:
        """The others, which are in no other number."""
        return int(self.counts[:, -1].sum())

    @property
    def absmax(self) -> float:
        return float(self.largest.max())

    @property
    def sum32(self) -> float:
        return float(self.sums.max())

    def part(self, owner: int) -> Histogram:
        """A view of one owner."""
        one = Histogram.__new__(Histogram)
        at = slice(owner, owner + 1)
        one.counts, one.largest, one.sums = self.counts[at], self.largest[at], self.sums[at]
        return one

    def owners(self) -> list[int]:
        """Owners that saw anything."""
        return [int(owner) for owner in np.flatnonzero(self.counts.any(axis=1))]

    def add(self, values: NDArray[np.float32], owners: NDArray[np.int32] | None = None) -> None:
        """Counts float32 values [..., channels]. owners: whose a row is, one for each row of values; without it, the first owner's.

        Sums are taken over 32 neighbouring channels of a row, the last group may be short.
        """
        from a3b_quantize.accumulate import count_rows  # numba: a third of a second

        if not values.size:
            return
        rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
        if owners is None:
            owners = np.zeros(len(rows), np.int32)
        count_rows(rows, np.ascontiguousarray(owners, np.int32).reshape(-1), self.counts, self.largest, self.sums, (SHIFT, LOWEST))

    def merge(self, other: Histogram) -> None:
        """Adds what `other`, with as many owners, has seen."""
        self.counts += other.counts
        np.maximum(self.largest, other.largest, out=self.largest)
        np.maximum(self.sums, other.sums, out=self.sums)

    def percentile(self, fraction: float) -> float:
        """The magnitude that `fraction` of the values do not exceed (numpy's method "inverted_cdf"), within MAX_ERROR; 0 when empty."""
        bins = self.bins
        total = int(bins.sum())
        if not total:
            return 0.0
        index = int(np.searchsorted(np.cumsum(bins), np.ceil(fraction * total)))
        return min(_middle(index), self.absmax)


def _middle(index: int) -> float:
    """The middle of a bin; bin 0 stands for zero."""
    if index == 0:
        return 0.0
    edges = np.array([index - 1, index], np.uint32) + np.uint32(LOWEST)
    low, high = (edges << np.uint32(SHIFT)).view(np.float32)
    return (float(low) + float(high)) / 2
