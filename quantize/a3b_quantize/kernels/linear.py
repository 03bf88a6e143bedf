"""Q8_0 and Q4_0: evenly spaced levels around zero, one scale a block of 32.

The search is ggml's (make_qx_quants in ggml-quants.c): inverse scales around the one that puts the largest weight on the last level,
a weighted least-squares scale for each. Rounding against the scale as float16 holds it makes the error smaller, never larger.
"""

from __future__ import annotations

import numpy as np

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import EPSILON, half_bits, half_value, largest

TENTH = number(0.1)
# Added to a float32 below 2^22 it leaves the nearest integer in the low bits. Source: nearest_int in ggml-quants.c
MAGIC, MAGIC_BITS = number(12582912), 0x4B400000


@inlined
def nearest(x: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """The integer nearest to x within low..high, ties to even."""
    x = x if x > low else low
    x = x if x < high else high
    return np.float32(x + MAGIC).view(np.int32) - np.int32(MAGIC_BITS)


@inlined
def error(scale: Scalar, top: Scalar, block: Floats, weight: Floats, n: Scalar) -> Scalar:
    """Weighted squared error of n weights under a scale, with levels -top..top-1."""
    inverse, total = ONE / scale, ZERO
    for j in range(n):
        off = block[j] - scale * np.float32(nearest(inverse * block[j], -top, top - ONE))
        total += weight[j] * off * off
    return total


@inlined
def search(top: Scalar, block: Floats, weight: Floats, n: Scalar) -> Scalar:
    """The least-squares scale of a block whose largest weight is 1, with levels -top..top-1, best of 19."""
    best, scale = ZERO, -ONE / top
    for step in range(-9, 10):
        inverse = -(top + TENTH * np.float32(step))
        sx, sq = ZERO, ZERO
        for j in range(n):
            q = np.float32(nearest(inverse * block[j], -top, top - ONE))
            wq = weight[j] * q
            sx += wq * block[j]
            sq += wq * q
        if sx * sx > best * sq:
            scale = sx / sq
            best = scale * sx
    return scale


@inlined
def settle(first: Scalar, second: Scalar, top: Scalar, peak: Scalar, block: Floats, weight: Floats) -> Scalar:
    """The float16 scale, as bits, of two (or a neighbour among subnormals) with the least weighted error.

    Zero only where zeros are the nearest that can be written. Infinity when neither fits.
    """
    least, chosen = ZERO, 0
    for j in range(32):
        least += weight[j] * block[j] * block[j]
    if (first & 0x7FFF) >= 0x7C00 and (second & 0x7FFF) >= 0x7C00:
        return 0x7C00
    for attempt in range(4):
        bits = (first if attempt % 2 == 0 else second) + attempt // 2
        size = bits & 0x7FFF
        if size >= 0x7C00 or size == 0 or (attempt >= 2 and size > 0x400):
            continue
        found = error(half_value(bits) / peak, top, block, weight, 32)
        if found < least:
            least, chosen = found, bits
    return chosen


@compiled
def q8_0(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """rows [n, columns], out [n, columns / 32 * 34]: float16 scale, 32 int8. Importance cannot help: rounding has one best answer."""
    block, weight = np.zeros(32, np.float32), np.ones(32, np.float32)
    low, high = np.float32(-127), np.float32(127)
    for r in range(rows.shape[0]):
        x = rows[r]
        for b in range(rows.shape[1] // 32):
            at, start, peak = b * 34, b * 32, ZERO
            for j in range(32):
                size = abs(x[start + j])
                peak = size if size > peak else peak
            bits = half_bits(peak / high)
            if bits < 0x400 and peak >= EPSILON:
                for j in range(32):
                    block[j] = x[start + j] / peak
                bits = settle(bits, bits, np.float32(128), peak, block, weight)
            inverse = ONE / half_value(bits) if 0 < bits < 0x7C00 else ZERO
            out[r, at], out[r, at + 1] = bits & 255, bits >> 8
            for j in range(32):
                out[r, at + 2 + j] = np.uint8(nearest(inverse * x[start + j], low, high))


@inlined
def mean_square(x: Floats) -> Scalar:
    """Mean square of a row, in float64, which holds the square of every float32."""
    total = 0.0
    for j in range(x.shape[0]):
        total += np.float64(x[j]) * np.float64(x[j])
    return total / x.shape[0]


@compiled
def q4_0(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 32 * 18]: float16 scale, 16 bytes of two codes.

    Without importance ggml does not search (quantize_row_q4_0_ref); here all weights count alike in the same search.
    """
    block, weight, codes = np.zeros(32, np.float32), np.ones(32, np.float32), np.zeros(32, np.uint8)
    top = np.float32(8)
    for r in range(rows.shape[0]):
        x = rows[r]
        square = mean_square(x) if weighted else 0.0
        for b in range(rows.shape[1] // 32):
            at, start = b * 18, b * 32
            peak = largest(x, start, 32)
            bits, inverse = 0, ZERO
            if abs(peak) >= EPSILON:
                inverse = ONE / peak
                spread = np.float32(min(square * np.float64(inverse) * np.float64(inverse), 1e30))
                for j in range(32):
                    block[j] = x[start + j] * inverse
                    if weighted:
                        weight[j] = importance[start + j] * np.sqrt(spread + block[j] * block[j])
                found = search(top, block, weight, 32)
                bits = settle(half_bits(found * peak), half_bits(-peak / top), top, peak, block, weight)
                inverse = peak / half_value(bits) if 0 < (bits & 0x7FFF) < 0x7C00 else ZERO
            for j in range(32):
                codes[j] = nearest(inverse * block[j], -top, top - ONE) + 8
            out[r, at], out[r, at + 1] = bits & 255, bits >> 8
            for j in range(16):
                out[r, at + 2 + j] = codes[j] | codes[j + 16] << 4
