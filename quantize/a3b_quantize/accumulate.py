"""One pass over activations, compiled: counts for histograms, sums of squares for importance. Arrays in, arrays changed in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_quantize.kernels.compiled import compiled

Floats = NDArray[np.float32]
GROUP = 32  # values of a Q8_1 block, whose sum is kept in F16


@compiled
def count_rows(
    values: Floats, owners: NDArray[np.int32], bins: NDArray[np.int64], absmax: Floats, sum32: NDArray[np.float64], shape: tuple[int, int]
) -> int:  # pragma: no cover - compiled
    """Counts |values| [rows, columns] into `bins` [owners, bins + 1]; the last column counts what is not finite.

    owners: whose a row is, [rows]. absmax, sum32: [owners], the largest |value| and the largest |sum over GROUP neighbours|; a sum
    counts a value that is not finite as 0. shape: how many low bits of a float32 a bin leaves out, and which shifted value is bin 1.
    Returns how many values are not finite.
    """
    shift, lowest = shape
    last = bins.shape[1] - 2
    bits = values.view(np.uint32)
    bad = 0
    for row in range(values.shape[0]):
        owner = owners[row]
        mine = bins[owner]
        largest = np.uint32(0)
        largest_sum = 0.0
        total = 0.0
        for column in range(values.shape[1]):
            magnitude = bits[row, column] & np.uint32(0x7FFFFFFF)
            if magnitude >= np.uint32(0x7F800000):  # NaN or infinite
                bad += 1
                mine[last + 1] += 1
            else:
                at = np.int64(magnitude >> np.uint32(shift)) - (lowest - 1)
                mine[min(max(at, 0), last)] += 1
                largest = max(largest, magnitude)
                total += values[row, column]
            if column % GROUP == GROUP - 1:
                largest_sum = max(largest_sum, abs(total))
                total = 0.0
        absmax[owner] = max(absmax[owner], np.uint32(largest).view(np.float32))
        sum32[owner] = max(sum32[owner], max(largest_sum, abs(total)))
    return bad


@compiled
def add_squares(
    values: NDArray[np.float32], owners: NDArray[np.int32], sums: NDArray[np.float64], counts: NDArray[np.int64]
) -> None:  # pragma: no cover - compiled
    """Adds x^2 of `values` [tokens, inputs, columns] to `sums` [owners, columns], and 1 to `counts` [owners] for each row.

    owners: [tokens, used]: whose a token is. Owner k of a token takes its input k % inputs, as ggml_mul_mat_id does.
    """
    for token in range(owners.shape[0]):
        for k in range(owners.shape[1]):
            owner = owners[token, k]
            counts[owner] += 1
            mine = sums[owner]
            row = values[token, k % values.shape[1]]
            for column in range(row.shape[0]):
                x = np.float64(row[column])
                mine[column] += x * x


@compiled
def add_capped_squares(
    values: NDArray[np.float32], owners: NDArray[np.int32], sums: NDArray[np.float64], caps: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """`add_squares` of min(|x|, caps[owner]), without counting."""
    for token in range(owners.shape[0]):
        for k in range(owners.shape[1]):
            owner = owners[token, k]
            mine = sums[owner]
            row = values[token, k % values.shape[1]]
            for column in range(row.shape[0]):
                x = np.float64(min(abs(row[column]), caps[owner]))
                mine[column] += x * x
