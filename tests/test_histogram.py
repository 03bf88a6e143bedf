"""The sketch behind clip_bounds.bin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from a3b_quantize.bounds import FRACTIONS
from a3b_quantize.histogram import MAX_ERROR, Histogram


def heavy_tailed(n: int, seed: int = 0) -> NDArray[np.float32]:
    values: NDArray[np.float32] = np.random.default_rng(seed).standard_t(3, n).astype(np.float32)
    return values


def test_percentiles_are_numpys_within_the_stated_error() -> None:
    for scale in (1e-6, 1.0, 3e4):
        values = heavy_tailed(200_000).reshape(-1, 64) * np.float32(scale)
        seen = Histogram()
        seen.add(values)
        for fraction in (0.001, 0.25, *FRACTIONS.values()):
            exact = float(np.quantile(np.abs(values), fraction, method="inverted_cdf"))
            assert seen.percentile(fraction) == pytest.approx(exact, rel=MAX_ERROR)
        assert seen.absmax == np.abs(values).max()
        assert seen.count == values.size


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, min_value=-(2.0**31), max_value=2.0**31), min_size=1, max_size=80), st.sampled_from([0.01, 0.5, 0.9, 1.0])
)
def test_any_finite_values(values: list[float], fraction: float) -> None:
    array = np.array(values, np.float32)
    seen = Histogram()
    seen.add(array)
    exact = float(np.quantile(np.abs(array), fraction, method="inverted_cdf"))
    assert seen.percentile(fraction) == pytest.approx(exact, rel=MAX_ERROR, abs=2.0**-32)
    assert seen.count == len(values)


def test_merging_is_seeing_both() -> None:
    values = heavy_tailed(4096).reshape(8, 512)
    values[3, 5] = np.nan
    whole, left, right = Histogram(), Histogram(), Histogram()
    whole.add(values)
    left.add(values[:3])
    right.add(values[3:])
    left.merge(right)
    assert np.array_equal(left.bins, whole.bins)
    assert (left.absmax, left.sum32, left.non_finite) == (whole.absmax, whole.sum32, whole.non_finite)
    assert whole.non_finite == 1


def test_values_that_are_not_finite_are_counted_apart() -> None:
    seen = Histogram()
    seen.add(np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32))
    assert (seen.count, seen.non_finite, seen.absmax, seen.sum32) == (1, 3, 1.0, 1.0)
    empty = Histogram()
    empty.add(np.empty((0, 32), np.float32))
    assert (empty.count, empty.percentile(0.5), empty.absmax) == (0, 0.0, 0.0)


def test_sums_are_over_32_neighbours() -> None:
    values = np.zeros((2, 80), np.float32)
    values[0, :32], values[0, 32:64], values[1, 64:] = 1.0, -2.0, 5.0
    seen = Histogram()
    seen.add(values)
    assert seen.sum32 == 80.0  # the short last group: 16 times 5
    values[1] = 0
    straddling = Histogram()
    straddling.add(values)
    assert straddling.sum32 == 64.0
