"""MXFP4: 32 four-bit floats (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) under a power of two.

ggml takes the power of two from the largest weight (quantize_row_mxfp4_ref in ggml-quants.c). Here its two neighbours are tried as well
and the one with the least error is kept, so outliers may be clipped and flat blocks get finer steps. Powers too small or too large for the
format's byte are clamped, where ggml's wrap around.
"""

from __future__ import annotations

import numpy as np

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number

TWO = number(2)
LARGEST = 252  # exponent plus 127 whose last level, 12 halves, is still a float32
# Borders between the levels 0, 1, 2, 3, 4, 6, 8, 12 of kvalues_mxfp4, which are twice the values
M0, M1, M2, M3, M4, M5, M6 = (number(border) for border in (0.5, 1.5, 2.5, 3.5, 5, 7, 10))


@inlined
def level(size: Scalar) -> Scalar:
    """The level nearest to a magnitude."""
    low = (ONE if size > M0 else ZERO) + (ONE if size > M1 else ZERO) + (ONE if size > M2 else ZERO) + (ONE if size > M3 else ZERO)
    high = (TWO if size > M4 else ZERO) + (TWO if size > M5 else ZERO) + (TWO + TWO if size > M6 else ZERO)
    return low + high


@inlined
def index(size: Scalar) -> Scalar:
    """Number of the level nearest to a magnitude, 0..7."""
    return (size > M0) + (size > M1) + (size > M2) + (size > M3) + (size > M4) + (size > M5) + (size > M6)


@inlined
def power(exponent: Scalar) -> Scalar:
    """2 to the exponent, -127..127."""
    if exponent == -127:
        return np.uint32(0x00400000).view(np.float32)
    return np.uint32((exponent + 127) << 23).view(np.float32)


@inlined
def choose(exponent: Scalar, block: Floats, weight: Floats) -> Scalar:
    """The exponent plus 127 with the least weighted error for a block that was divided by 2 to the `exponent` - 127, its largest's."""
    least, chosen = np.float32(np.inf), 0
    for attempt in range(max(exponent - 3, 0), min(exponent, LARGEST + 1)):
        scale = power(attempt - exponent - 1)
        back, total = ONE / scale, ZERO
        for j in range(32):
            size = abs(block[j])
            off = size - scale * level(back * size)
            total += weight[j] * off * off
        if total < least:
            least, chosen = total, attempt
    return chosen


@compiled
def mxfp4(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 32 * 17]: exponent plus 127, 16 bytes of codes."""
    block, weight, codes = np.zeros(32, np.float32), np.ones(32, np.float32), np.zeros(32, np.uint8)
    for r in range(rows.shape[0]):
        for b in range(rows.shape[1] // 32):
            at, start, peak = b * 17, b * 32, ZERO
            for j in range(32):
                size = abs(rows[r, start + j])
                peak = size if size > peak else peak
            # floor(log2(peak)) + 127 is in its bits; subnormals count as the least normal
            exponent: Scalar = max(np.int64(np.float32(peak).view(np.uint32)) >> 23, 1)
            inverse = power(127 - exponent)
            for j in range(32):
                block[j] = rows[r, start + j] * inverse
                if weighted:
                    weight[j] = importance[start + j]
            chosen = choose(exponent, block, weight)
            back = power(exponent + 1 - chosen)
            for j in range(32):
                code = index(back * abs(block[j]))
                codes[j] = code + 8 if block[j] < 0 and code > 0 else code
            out[r, at] = chosen if peak > 0 else 0
            for j in range(16):
                out[r, at + 1 + j] = codes[j] | codes[j + 16] << 4
