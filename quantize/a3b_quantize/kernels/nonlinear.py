"""IQ4_NL and IQ4_XS: 4 bits that choose among 16 unevenly spaced levels.

The search is ggml's (quantize_row_iq4_nl_impl in ggml-quants.c): 16 inverse scales, a weighted least-squares scale for each, the best
is kept. What differs: the nearest level is found by compares and adds, which become vector code, where ggml's binary search
mispredicts; a block is divided by its largest weight first, so that no sum overflows or underflows; and weights are rounded against
the scale as float16 holds it, so the error is never larger for the same scale.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import COARSE, EPSILON, half_bits, half_value, largest

# Source: kvalues_iq4nl in ggml-common.h
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
LOWEST = number(-127)
M0, M1, M2, M3, M4, M5, M6, M7, M8, M9, M10, M11, M12, M13, M14 = (number((a + b) / 2) for a, b in pairwise(LEVELS))
S0, S1, S2, S3, S4, S5, S6, S7, S8, S9, S10, S11, S12, S13, S14 = (number(b - a) for a, b in pairwise(LEVELS))


@inlined
def level(x: Scalar) -> Scalar:
    """Value of the level nearest to x."""
    a = (S0 if x > M0 else ZERO) + (S1 if x > M1 else ZERO) + (S2 if x > M2 else ZERO) + (S3 if x > M3 else ZERO)
    b = (S4 if x > M4 else ZERO) + (S5 if x > M5 else ZERO) + (S6 if x > M6 else ZERO) + (S7 if x > M7 else ZERO)
    c = (S8 if x > M8 else ZERO) + (S9 if x > M9 else ZERO) + (S10 if x > M10 else ZERO) + (S11 if x > M11 else ZERO)
    d = (S12 if x > M12 else ZERO) + (S13 if x > M13 else ZERO) + (S14 if x > M14 else ZERO)
    return (a + b) + (c + d) + LOWEST


@inlined
def index(x: Scalar) -> Scalar:
    """Number of the level nearest to x, 0..15."""
    a = (x > M0) + (x > M1) + (x > M2) + (x > M3) + (x > M4) + (x > M5) + (x > M6) + (x > M7)
    return a + (x > M8) + (x > M9) + (x > M10) + (x > M11) + (x > M12) + (x > M13) + (x > M14)


@inlined
def fit(inverse: Scalar, block: Floats, weight: Floats) -> tuple[Scalar, Scalar]:
    """Sums (w q x, w q q) over a block whose levels q are nearest to inverse * x."""
    sx, sq = ZERO, ZERO
    for j in range(32):
        q = level(inverse * block[j])
        wq = weight[j] * q
        sx += wq * block[j]
        sq += wq * q
    return sx, sq


@inlined
def error(scale: Scalar, block: Floats, weight: Floats) -> Scalar:
    """Weighted squared error of a block under a scale."""
    inverse, total = ONE / scale, ZERO
    for j in range(32):
        off = block[j] - scale * level(inverse * block[j])
        total += weight[j] * off * off
    return total


@inlined
def search(block: Floats, weight: Floats) -> tuple[Scalar, Scalar, Scalar]:
    """Scales for a block whose largest weight is 1: the best with that weight at level 113, at level -127 or beyond, and of both."""
    sx, sq = fit(-LOWEST, block, weight)
    up = sx / sq
    gain = up * sx
    best, down = ZERO, ONE / LOWEST
    for t in range(-7, 8):
        sx, sq = fit(LOWEST + np.float32(t), block, weight)
        if sx * sx > best * sq:
            down = sx / sq
            best = down * sx
    return up, down, (up if gain >= best else down)


@inlined
def settle(up: Scalar, down: Scalar, peak: Scalar, block: Floats, weight: Floats) -> Scalar:
    """The float16 scale, as bits, of the two found ones (or its neighbour among subnormals) with the least weighted error.

    Zero only where zeros are the nearest that can be written. Infinity when neither fits.
    """
    least, chosen = ZERO, 0
    for j in range(32):
        least += weight[j] * block[j] * block[j]
    first, second = half_bits(up * peak), half_bits(down * peak)
    if (first & 0x7FFF) >= 0x7C00 and (second & 0x7FFF) >= 0x7C00:
        return 0x7C00
    for attempt in range(4):
        bits = (first if attempt % 2 == 0 else second) + attempt // 2
        size = bits & 0x7FFF
        if size >= 0x7C00 or size == 0 or (attempt >= 2 and size > 0x400):
            continue
        found = error(half_value(bits) / peak, block, weight)
        if found < least:
            least, chosen = found, bits
    return chosen


@inlined
def weigh(block: Floats, spread: Scalar, importance: Floats, start: Scalar, weighted: bool, weight: Floats) -> None:
    """Fills weight [32], how much the error of each counts: its square, or its importance times the root of spread plus its square."""
    for j in range(32):
        weight[j] = block[j] * block[j]
    if weighted:
        for j in range(32):
            weight[j] = importance[start + j] * np.sqrt(spread + weight[j])


@inlined
def encode(inverse: Scalar, block: Floats, codes: Bytes, to: Bytes) -> None:
    """Fills to [16] with the codes of a block: low nibbles the first 16 weights, high nibbles the others."""
    for j in range(32):
        codes[j] = index(inverse * block[j])
    for j in range(16):
        to[j] = codes[j] | codes[j + 16] << 4


@compiled
def iq4_nl(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 32 * 18]: float16 scale, 16 bytes of two codes."""
    block, weight, codes = np.zeros(32, np.float32), np.zeros(32, np.float32), np.zeros(32, np.uint8)
    for r in range(rows.shape[0]):
        x = rows[r]
        for b in range(rows.shape[1] // 32):
            at = b * 18
            peak = largest(x, b * 32, 32)
            bits, inverse = 0, ZERO
            if abs(peak) >= EPSILON:
                inverse, square = ONE / peak, ZERO
                for j in range(32):
                    block[j] = x[b * 32 + j] * inverse
                    square += block[j] * block[j]
                square *= np.float32(2 / 32)
                weigh(block, square, importance, b * 32, weighted, weight)
                up, down, _ = search(block, weight)
                bits = settle(up, down, peak, block, weight)
                if weighted and bits == 0:  # there is no level 0: unimportant weights among important zeros fit best when they vanish
                    weigh(block, square, importance, b * 32, False, weight)
                    up, down, _ = search(block, weight)
                    bits = settle(up, down, peak, block, weight)
                inverse = peak / half_value(bits) if bits & 0x7FFF else ZERO
            out[r, at], out[r, at + 1] = bits & 255, bits >> 8
            encode(inverse, block, codes, out[r, at + 2 : at + 18])


@inlined
def share(bits: Scalar, blocks: Floats, weights: Floats, peaks: Floats, scales: Floats, parts: Bytes) -> Scalar:
    """Fills parts [8], the scale of each block in units of a common float16 scale, plus 32. Returns the weighted squared error.

    Of the three nearest units the one with the least error is kept.
    """
    unit, total = half_value(bits), ZERO
    for b in range(8):
        block, weight = blocks[b], weights[b]
        least, part, peak = ZERO, 0, peaks[b]
        for j in range(32):
            least += weight[j] * block[j] * block[j]
        if abs(peak) >= EPSILON:
            near: Scalar = np.int64(np.rint(min(max(scales[b] / unit, np.float32(-32)), np.float32(31))))
            for attempt in range(max(-32, near - 1), min(31, near + 1) + 1):
                if attempt != 0:
                    found = error(unit * np.float32(attempt) / peak, block, weight)
                    if found < least:
                        least, part = found, attempt
            total += least * peak * peak
        parts[b] = part + 32
    return total


@inlined
def highest(scales: Floats) -> Scalar:
    """The scale with the largest magnitude."""
    top = ZERO
    for b in range(8):
        top = scales[b] if abs(scales[b]) > abs(top) else top
    return top


@inlined
def common(blocks: Floats, weights: Floats, peaks: Floats, found: Floats, parts: Bytes) -> Scalar:
    """The bits of the common scale for the scales in found [3, 8] (best, up, down); fills parts.

    Where hardly any error is left the rounding of scales is all of it, and both directions are tried; where the scale is coarse, its
    neighbour too.
    """
    chosen = half_bits(-highest(found[0]) / np.float32(32))
    if (chosen & 0x7FFF) >= 0x7C00:
        parts[:] = 32
        return 0x7C00
    chosen = chosen if chosen & 0x7FFF else chosen + 1
    which, whole = 0, ZERO
    least = share(chosen, blocks, weights, peaks, found[0], parts)
    for b in range(8):
        for j in range(32):
            whole += weights[b, j] * (blocks[b, j] * peaks[b]) * (blocks[b, j] * peaks[b])
    if (chosen & 0x7FFF) >= COARSE and least > np.float32(1e-6) * whole:
        return chosen
    for attempt in range(6):
        tried = half_bits(-highest(found[attempt % 3]) / np.float32(32)) + attempt // 3
        if (tried & 0x7FFF) != 0 and (tried & 0x7FFF) < 0x7C00:
            new = share(tried, blocks, weights, peaks, found[attempt % 3], parts)
            if new < least:
                least, chosen, which = new, tried, attempt % 3
    share(chosen, blocks, weights, peaks, found[which], parts)
    return chosen


@inlined
def prepare(x: Floats, start: Scalar, blocks: Floats, weights: Floats, peaks: Floats, importance: Floats, weighted: bool) -> None:
    """Fills blocks and weights [8, 32], each block divided by its largest weight, and peaks [8], from 256 weights at `start`."""
    square = 0.0
    for j in range(256):
        square += np.float64(x[start + j]) * np.float64(x[start + j])
    square *= 2 / 256
    for b in range(8):
        first = start + b * 32
        peak = largest(x, first, 32)
        inverse = ONE / peak if abs(peak) >= EPSILON else ZERO
        peaks[b] = peak if abs(peak) >= EPSILON else ZERO
        spread = np.float32(min(square * np.float64(inverse) * np.float64(inverse), 1e30))
        for j in range(32):
            blocks[b, j] = x[first + j] * inverse
        weigh(blocks[b], spread, importance, first, weighted, weights[b])


@inlined
def search_all(blocks: Floats, weights: Floats, peaks: Floats, found: Floats) -> None:
    """Fills found [3, 8]: of each block the best scale, and the best in either direction."""
    for b in range(8):
        up, down, best = ZERO, ZERO, ZERO
        if peaks[b] != 0:
            up, down, best = search(blocks[b], weights[b])
        found[0, b], found[1, b], found[2, b] = best * peaks[b], up * peaks[b], down * peaks[b]


@compiled
def iq4_xs(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """As iq4_nl, out [n, columns / 256 * 136]: float16 scale, 2 bytes with the high 2 bits of 8 parts, 4 with the low 4, 128 of codes."""
    blocks, weights, codes = np.zeros((8, 32), np.float32), np.zeros((8, 32), np.float32), np.zeros(32, np.uint8)
    found, peaks, parts = np.zeros((3, 8), np.float32), np.zeros(8, np.float32), np.zeros(8, np.uint8)
    for r in range(rows.shape[0]):
        x = rows[r]
        for s in range(rows.shape[1] // 256):
            at, bits = s * 136, 0
            parts[:] = 32
            prepare(x, s * 256, blocks, weights, peaks, importance, weighted)
            search_all(blocks, weights, peaks, found)
            if highest(found[0]) != 0:
                bits = common(blocks, weights, peaks, found, parts)
            if weighted and (parts == 32).all() and highest(peaks) != 0:  # as in iq4_nl
                prepare(x, s * 256, blocks, weights, peaks, importance, False)
                search_all(blocks, weights, peaks, found)
                bits = common(blocks, weights, peaks, found, parts)
            out[r, at], out[r, at + 1] = bits & 255, bits >> 8
            out[r, at + 2 : at + 8] = 0
            for b in range(8):
                part = np.int64(parts[b])
                out[r, at + 2 + b // 4] |= (part >> 4) << 2 * (b % 4)
                out[r, at + 4 + b // 2] |= (part & 15) << 4 * (b % 2)
                unit = half_value(bits) * np.float32(part - 32)
                inverse = peaks[b] / unit if part != 32 else ZERO
                encode(inverse, blocks[b], codes, out[r, at + 8 + b * 16 : at + 24 + b * 16])
