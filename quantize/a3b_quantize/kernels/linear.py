"""Evenly spaced levels, and Q8_0: a float16 scale a block of 32 and int8 codes."""

from __future__ import annotations

import numpy as np

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import EPSILON, half_bits, half_value

# Added to a float32 below 2^22 it leaves the nearest integer in the low bits. Source: nearest_int in ggml-quants.c
MAGIC, MAGIC_BITS = number(12582912), 0x4B400000


@inlined
def nearest(x: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """The integer nearest to x within low..high, ties to even."""
    x = x if x > low else low
    x = x if x < high else high
    return np.float32(x + MAGIC).view(np.int32) - np.int32(MAGIC_BITS)


@inlined
def clamped(x: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """As `nearest`, as a float32."""
    x = x if x > low else low
    x = x if x < high else high
    return np.rint(x)


@inlined
def error(bits: Scalar, peak: Scalar, block: Floats) -> Scalar:
    """Squared error of a block, given in units of its peak, under the scale of these bits."""
    scale, total = half_value(bits) / peak, ZERO
    inverse = ONE / scale
    for j in range(32):
        off = block[j] - scale * clamped(inverse * block[j], np.float32(-127), np.float32(127))
        total += off * off
    return total


@inlined
def settle(bits: Scalar, peak: Scalar, block: Floats) -> Scalar:
    """These bits, the next or 0: what errs least where scales are subnormal. Zero only where zeros are the nearest that can be written."""
    least, chosen = ZERO, 0
    for j in range(32):
        least += block[j] * block[j]
    for tried in range(max(bits, 1), bits + 2):
        found = error(tried, peak, block)
        if found < least:
            least, chosen = found, tried
    return chosen


@compiled
def q8_0(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """rows [n, columns], out [n, columns / 32 * 34]: float16 scale, 32 int8. Importance cannot help: rounding has one best answer."""
    block = np.zeros(32, np.float32)
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
                bits = settle(bits, peak, block)
            inverse = ONE / half_value(bits) if 0 < bits < 0x7C00 else ZERO
            out[r, at], out[r, at + 1] = bits & 255, bits >> 8
            for j in range(32):
                out[r, at + 2 + j] = np.uint8(nearest(inverse * x[start + j], low, high))
