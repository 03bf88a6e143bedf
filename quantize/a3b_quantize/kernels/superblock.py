"""Q6_K: 16 blocks of 16 weights, each with an 8-bit scale under a common float16 scale.

The search is ggml's (make_qx_quants in ggml-quants.c). It runs over all blocks of a row at once, one block a vector lane, since loops
over the 16 weights of one block are too short for vectors; each part of a scale is the best of the three nearest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import COARSE, EPSILON, half_bits, half_value
from a3b_quantize.kernels.linear import nearest

Ints = NDArray[np.int32]
Lanes = tuple[Floats, Floats, Floats, Floats]  # y and w [16, blocks], peaks and scales [blocks]
Found = tuple[Lanes, Ints, NDArray[np.int64]]  # and parts [blocks], bits of the common scales [blocks / 16]
Spare = tuple[Floats, Floats, Ints, NDArray[np.int64], Floats]

TENTH, EXACT = number(0.1), number(1e-6)


@inlined
def load(x: Floats, importance: Floats, weighted: bool, y: Floats, w: Floats, peaks: Floats) -> None:
    """Fills y and w [16, blocks] with the row x, each block divided by its largest weight, and peaks [blocks] with that."""
    for b in range(peaks.shape[0]):
        for j in range(16):
            y[j, b] = x[b * 16 + j]
            w[j, b] = importance[b * 16 + j] if weighted else ONE
    for b in range(peaks.shape[0]):
        peak, size = ZERO, EPSILON
        for j in range(16):
            value = y[j, b]
            larger = abs(value) > size
            peak = value if larger else peak
            size = abs(value) if larger else size
        peaks[b] = peak
        inverse = ONE / peak if peak != 0 else ZERO
        for j in range(16):
            value = y[j, b] * inverse
            y[j, b] = value
            w[j, b] = w[j, b] if weighted else value * value


@inlined
def search(top: Scalar, y: Floats, w: Floats, scales: Floats, best: Floats) -> None:
    """Fills scales [blocks]: for each block, in units of its largest weight, the best of 19 with levels -top..top-1."""
    for b in range(scales.shape[0]):
        best[b], scales[b] = ZERO, -ONE / top
    for step in range(-9, 10):
        inverse = -(top + TENTH * np.float32(step))
        for b in range(scales.shape[0]):
            sx, sq = ZERO, ZERO
            for j in range(16):
                q = np.float32(nearest(inverse * y[j, b], -top, top - ONE))
                wq = w[j, b] * q
                sx += wq * y[j, b]
                sq += wq * q
            better, scale = sx * sx > best[b] * sq, sx / sq
            scales[b] = scale if better else scales[b]
            best[b] = scale * sx if better else best[b]


@inlined
def share(top: Scalar, lanes: Lanes, units: Floats, parts: Ints, least: Floats) -> None:
    """Fills parts [blocks], -128..127, each block's scale in its unit, the best of the three nearest; and least [blocks], its error."""
    y, w, peaks, scales = lanes
    low, high = np.int32(-128), np.int32(127)
    for b in range(parts.shape[0]):
        total = ZERO
        for j in range(16):
            total += w[j, b] * y[j, b] * y[j, b]
        parts[b], least[b] = 0, total
    for attempt in range(-1, 2):
        for b in range(parts.shape[0]):
            near = nearest(scales[b] * peaks[b] / units[b], np.float32(low), np.float32(high)) + np.int32(attempt)
            part = min(max(near, low), high)
            scale = units[b] * np.float32(part) / peaks[b]
            inverse, total = ONE / scale, ZERO
            for j in range(16):
                off = y[j, b] - scale * np.float32(nearest(inverse * y[j, b], -top, top - ONE))
                total += w[j, b] * off * off
            better = total < least[b] and part != 0
            parts[b] = part if better else parts[b]
            least[b] = total if better else least[b]


@inlined
def unite(peaks: Floats, scales: Floats, bits: NDArray[np.int64], units: Floats, more: Scalar, less: Scalar) -> bool:
    """Fills bits [blocks / 16], the common scales, and units [blocks], their values, for parts up to 128 - less.

    Adds `more` to the bits of coarse ones; returns whether any is.
    """
    coarse = False
    for s in range(bits.shape[0]):
        most = ZERO
        for b in range(16 * s, 16 * s + 16):
            scale = scales[b] * peaks[b]
            most = scale if abs(scale) > abs(most) else most
        found = half_bits(-most / np.float32(128 - less))
        if most != 0 and (found & 0x7FFF) < COARSE:
            found += more
            coarse = True
        bits[s] = found
        for b in range(16 * s, 16 * s + 16):
            units[b] = half_value(found) if (found & 0x7FFF) < 0x7C00 else ZERO
    return coarse


@inlined
def error_of(s: Scalar, least: Floats, peaks: Floats) -> Scalar:
    """Weighted squared error of a super-block, in units of its largest weight's square."""
    most, total = ZERO, ZERO
    for b in range(16 * s, 16 * s + 16):
        most = max(most, abs(peaks[b]))
    for b in range(16 * s, 16 * s + 16):
        total += least[b] * (peaks[b] / most) * (peaks[b] / most)
    return total


@inlined
def exact(lanes: Lanes, least: Floats) -> bool:
    """Whether a super-block has so little error left that the rounding of its common scale is all of it."""
    y, w, peaks, _ = lanes
    for s in range(peaks.shape[0] // 16):
        most, whole = ZERO, ZERO
        for b in range(16 * s, 16 * s + 16):
            most = max(most, abs(peaks[b]))
        for b in range(16 * s, 16 * s + 16):
            for j in range(16):
                whole += w[j, b] * (y[j, b] * (peaks[b] / most)) * (y[j, b] * (peaks[b] / most))
        if most > 0 and error_of(s, least, peaks) <= EXACT * whole:
            return True
    return False


@inlined
def fit(x: Floats, importance: Floats, weighted: bool, top: Scalar, found: Found, spare: Spare) -> None:
    """Fills found from the row x, with levels -top..top-1.

    Where a scale is coarse its neighbour is tried too, and where hardly any error is left, scales that make the largest part smaller.
    """
    lanes, parts, bits = found
    y, w, peaks, scales = lanes
    units, least, next_parts, next_bits, next_least = spare
    load(x, importance, weighted, y, w, peaks)
    search(top, y, w, scales, least)
    coarse = unite(peaks, scales, bits, units, 0, 0)
    share(top, lanes, units, parts, least)
    attempts = 8 if exact(lanes, least) else 1
    for attempt in range(0 if coarse else 1, attempts):
        unite(peaks, scales, next_bits, units, 1 if attempt == 0 else 0, attempt)
        share(top, lanes, units, next_parts, next_least)
        for s in range(bits.shape[0]):
            if next_bits[s] != bits[s] and error_of(s, next_least, peaks) < error_of(s, least, peaks):
                bits[s] = next_bits[s]
                parts[16 * s : 16 * s + 16] = next_parts[16 * s : 16 * s + 16]
                least[16 * s : 16 * s + 16] = next_least[16 * s : 16 * s + 16]


@inlined
def encode(s: Scalar, top: Scalar, found: Found, codes: Bytes) -> None:
    """Fills codes [256], 0..2 top - 1, of super-block s."""
    (y, _, peaks, _), parts, bits = found
    for b in range(16 * s, 16 * s + 16):
        inverse = peaks[b] / (half_value(bits[s]) * np.float32(parts[b])) if parts[b] != 0 else ZERO
        for j in range(16):
            codes[16 * (b - 16 * s) + j] = nearest(inverse * y[j, b], -top, top - ONE) + np.int32(top)


@inlined
def memory(n: Scalar) -> tuple[Found, Spare]:
    """Arrays for rows of n blocks."""
    lanes = np.zeros((16, n), np.float32), np.zeros((16, n), np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    spare = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros(n // 16, np.int64), np.zeros(n, np.float32)
    return (lanes, np.zeros(n, np.int32), np.zeros(n // 16, np.int64)), spare


@inlined
def pack(codes: Bytes, to: Bytes) -> None:
    """256 codes of 6 bits into 192 bytes: 128 of low halves, 64 of the high 2 bits. Source: quantize_row_q6_K_ref."""
    for half in range(2):
        for j in range(32):
            a, b = codes[half * 128 + j], codes[half * 128 + j + 32]
            c, d = codes[half * 128 + j + 64], codes[half * 128 + j + 96]
            to[half * 64 + j] = (a & 15) | (c & 15) << 4
            to[half * 64 + j + 32] = (b & 15) | (d & 15) << 4
            to[128 + half * 32 + j] = a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6


@compiled
def q6_k(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 256 * 210]: 192 bytes of codes, 16 int8, float16."""
    codes, top = np.zeros(256, np.uint8), np.float32(32)
    found, spare = memory(rows.shape[1] // 16)
    _, parts, bits = found
    for r in range(rows.shape[0]):
        fit(rows[r], importance, weighted, top, found, spare)
        for s in range(bits.shape[0]):
            to = out[r, s * 210 : s * 210 + 210]
            encode(s, top, found, codes)
            pack(codes, to)
            for b in range(16):
                to[192 + b] = np.uint8(parts[16 * s + b])
            to[208], to[209] = bits[s] & 255, bits[s] >> 8
