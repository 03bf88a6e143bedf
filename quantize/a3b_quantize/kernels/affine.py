"""Q4_K and Q5_K: 8 blocks of 32 weights, each with a 6-bit scale and a 6-bit offset under common float16 ones.

The search is ggml's (make_qkx2_quants and make_qkx3_quants in ggml-quants.c): for each of a row of inverse scales the codes, then the
weighted least-squares scale and offset for them. The error comes from the same sums, where ggml goes over the block again. Of each
block's scale and offset the 6-bit values below and above are tried together, the pair with the least error is kept.
"""

from __future__ import annotations

import numpy as np

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import COARSE, EPSILON, half_bits, half_value
from a3b_quantize.kernels.linear import nearest

# blocks and weights [8, 32]; peaks, scales and offsets [8]
Found = tuple[Floats, Floats, Floats, Floats, Floats]

MOST = number(63)
# Codes that spread less than this (as a share of their mean square) are one code: a slope through them would be noise.
FLAT = number(1e-5)
# A gain this much larger (as a share), or an error this small, is rounding of float32 or of scales.
EXACT = number(1e-6)


@inlined
def search(top: Scalar, first: Scalar, step: Scalar, steps: Scalar, block: Floats, weight: Floats) -> tuple[Scalar, Scalar]:
    """Scale and offset (both at least 0) of a block with codes 0..top: value = scale * code - offset."""
    low, high, sw, sx = ZERO, block[0], ZERO, ZERO
    for j in range(32):
        low = block[j] if block[j] < low else low
        high = block[j] if block[j] > high else high
        sw += weight[j]
        sx += weight[j] * block[j]
    if high <= low:
        return ZERO, -low
    scale, offset, best = (high - low) / top, abs(low), np.float32(-1)
    for t in range(steps):
        inverse = (top + first + step * np.float32(t)) / (high - low)
        sl, sll, sxl = ZERO, ZERO, ZERO
        for j in range(32):
            q = np.float32(nearest(inverse * (block[j] - low), ZERO, top))
            wq = weight[j] * q
            sl += wq
            sll += wq * q
            sxl += wq * block[j]
        spread = sw * sll - sl * sl
        slope, base = sxl / sll, ZERO
        if spread > FLAT * sw * sll:
            tilted, moved = (sw * sxl - sx * sl) / spread, (sll * sx - sl * sxl) / spread
            slope, base = (slope, base) if moved > 0 else (tilted, moved)
        gain = slope * sxl + base * sx
        if gain > best + EXACT * abs(best) and slope > 0:
            scale, offset, best = slope, abs(base), gain
            low = base  # the next codes start from the offset found, as in ggml
    return scale, offset


@inlined
def error(scale: Scalar, offset: Scalar, top: Scalar, block: Floats, weight: Floats) -> Scalar:
    """Weighted squared error of a block under a scale and an offset."""
    inverse, total = ONE / scale if scale > 0 else ZERO, ZERO
    for j in range(32):
        off = block[j] + offset - scale * np.float32(nearest(inverse * (block[j] + offset), ZERO, top))
        total += weight[j] * off * off
    return total


@inlined
def share(unit: Scalar, step: Scalar, top: Scalar, found: Found, parts: Bytes) -> Scalar:
    """Fills parts [2, 8], each block's scale in units and offset in steps. Returns the weighted squared error."""
    blocks, weights, peaks, scales, offsets = found
    total = ZERO
    for b in range(8):
        peak, least = peaks[b], np.float32(np.inf)
        low = np.int64(min(scales[b] / unit, MOST)) if unit > 0 else 0
        under = np.int64(min(offsets[b] / step, MOST)) if step > 0 else 0
        parts[0, b], parts[1, b] = 0, 0
        if peak == 0:
            continue
        for attempt in range(4):
            part, offset = min(low + attempt % 2, 63), min(under + attempt // 2, 63)
            new = error(unit * np.float32(part) / peak, step * np.float32(offset) / peak, top, blocks[b], weights[b])
            if new < least:
                least, parts[0, b], parts[1, b] = new, part, offset
        total += least * peak * peak
    return total


@inlined
def sizes(found: Found) -> Scalar:
    """Weighted sum of squares of a super-block, in the units of `share`."""
    blocks, weights, peaks, _, _ = found
    total = ZERO
    for b in range(8):
        for j in range(32):
            total += weights[b, j] * (blocks[b, j] * peaks[b]) * (blocks[b, j] * peaks[b])
    return total


@inlined
def common(top: Scalar, found: Found, parts: Bytes) -> tuple[Scalar, Scalar]:
    """The bits of the common scale and offset; fills parts [2, 8].

    Coarse ones are tried together with their neighbours. Where hardly any error is left the rounding of the two is all of it, and the
    largest part may be smaller than 63 when that rounds better.
    """
    _, _, _, scales, offsets = found
    largest, deepest = scales.max(), offsets.max()
    d, m = half_bits(largest / MOST), half_bits(deepest / MOST)
    if d >= 0x7C00 or m >= 0x7C00:
        parts[:] = 0
        return 0x7C00, 0x7C00
    least = share(half_value(d), half_value(m), top, found, parts)
    coarse = d < COARSE or 0 < m < COARSE
    if least <= 0 or (not coarse and least > EXACT * sizes(found)):
        return d, m
    chosen_d, chosen_m = d, m
    for attempt in range(1, 4 if coarse else 9):
        next_d, next_m = d + attempt % 2, m + attempt // 2
        if not coarse:
            next_d, next_m = half_bits(largest / (MOST - np.float32(attempt))), half_bits(deepest / (MOST - np.float32(attempt)))
        if next_d < 0x7C00 and next_m < 0x7C00:
            new = share(half_value(next_d), half_value(next_m), top, found, parts)
            if new < least:
                least, chosen_d, chosen_m = new, next_d, next_m
    share(half_value(chosen_d), half_value(chosen_m), top, found, parts)
    return chosen_d, chosen_m


@inlined
def prepare(x: Floats, start: Scalar, importance: Floats, weighted: bool, found: Found) -> None:
    """Fills blocks, weights and peaks from 256 weights at `start`, each block divided by its largest magnitude."""
    blocks, weights, peaks, _, _ = found
    whole = 0.0
    for j in range(256):
        whole += np.float64(x[start + j]) * np.float64(x[start + j])
    whole *= 2 / 256
    for b in range(8):
        peak, first, square = ZERO, start + 32 * b, ZERO
        for j in range(32):
            size = abs(x[first + j])
            peak = size if size > peak else peak
        peaks[b] = peak if peak >= EPSILON else ZERO
        inverse = ONE / peak if peak >= EPSILON else ZERO
        for j in range(32):
            blocks[b, j] = x[first + j] * inverse
            square += blocks[b, j] * blocks[b, j]
        mean = np.sqrt(square / np.float32(32))
        spread = np.float32(min(whole * np.float64(inverse) * np.float64(inverse), 1e30))
        for j in range(32):
            weights[b, j] = mean + abs(blocks[b, j])
        if weighted:
            for j in range(32):
                weights[b, j] = importance[first + j] * np.sqrt(spread + blocks[b, j] * blocks[b, j])


@inlined
def fit(x: Floats, start: Scalar, importance: Floats, weighted: bool, top: Scalar, found: Found, parts: Bytes) -> tuple[Scalar, Scalar]:
    """The bits of the common scale and offset for 256 weights at `start`; fills found and parts."""
    blocks, weights, peaks, scales, offsets = found
    prepare(x, start, importance, weighted, found)
    first, step, steps = np.float32(-1), np.float32(0.1), 21
    if weighted:
        first, step, steps = np.float32(-0.9), np.float32(0.05), 37
    elif top > 15:
        first, steps = np.float32(-0.5), 16
    for b in range(8):
        scales[b], offsets[b] = ZERO, ZERO
        if peaks[b] != 0:
            scale, offset = search(top, first, step, steps, blocks[b], weights[b])
            scales[b], offsets[b] = scale * peaks[b], offset * peaks[b]
    return common(top, found, parts)


@inlined
def encode(d: Scalar, m: Scalar, top: Scalar, found: Found, parts: Bytes, codes: Bytes, to: Bytes) -> None:
    """Fills codes [256], and to [16] with the two float16 and 12 bytes of parts. Source: get_scale_min_k4 in ggml-quants.c."""
    blocks, _, peaks, _, _ = found
    unit, step = half_value(d), half_value(m)
    for b in range(8):
        scale, offset, peak = unit * np.float32(parts[0, b]), step * np.float32(parts[1, b]), peaks[b]
        inverse, moved = (peak / scale, offset / peak) if parts[0, b] > 0 else (ZERO, ZERO)
        for j in range(32):
            codes[b * 32 + j] = nearest(inverse * (blocks[b, j] + moved), ZERO, top)
    to[0], to[1], to[2], to[3] = d & 255, d >> 8, m & 255, m >> 8
    for b in range(4):
        to[4 + b] = parts[0, b] | (parts[0, b + 4] >> 4) << 6
        to[8 + b] = parts[1, b] | (parts[1, b + 4] >> 4) << 6
        to[12 + b] = (parts[0, b + 4] & 15) | (parts[1, b + 4] & 15) << 4


@inlined
def memory() -> Found:
    """Arrays for one super-block."""
    blocks, weights = np.zeros((8, 32), np.float32), np.zeros((8, 32), np.float32)
    return blocks, weights, np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)


@compiled
def q4_k(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 256 * 144]: two float16, 12 bytes, 128."""
    found, parts, codes, top = memory(), np.zeros((2, 8), np.uint8), np.zeros(256, np.uint8), np.float32(15)
    for r in range(rows.shape[0]):
        for s in range(rows.shape[1] // 256):
            to = out[r, s * 144 : s * 144 + 144]
            d, m = fit(rows[r], s * 256, importance, weighted, top, found, parts)
            encode(d, m, top, found, parts, codes, to)
            for k in range(4):
                for j in range(32):
                    to[16 + 32 * k + j] = codes[64 * k + j] | codes[64 * k + 32 + j] << 4


@compiled
def q5_k(rows: Floats, importance: Floats, weighted: bool, out: Bytes) -> None:
    """As q4_k, out [n, columns / 256 * 176]: float16 scale and offset, 12 bytes of parts, 32 of fifth bits, 128 of the lower four."""
    found, parts, codes, top = memory(), np.zeros((2, 8), np.uint8), np.zeros(256, np.uint8), np.float32(31)
    for r in range(rows.shape[0]):
        for s in range(rows.shape[1] // 256):
            to = out[r, s * 176 : s * 176 + 176]
            d, m = fit(rows[r], s * 256, importance, weighted, top, found, parts)
            encode(d, m, top, found, parts, codes, to)
            to[16:48] = 0
            for k in range(8):
                for j in range(32):
                    to[16 + j] |= (codes[32 * k + j] >> 4) << k
            for k in range(4):
                for j in range(32):
                    to[48 + 32 * k + j] = (codes[64 * k + j] & 15) | (codes[64 * k + 32 + j] & 15) << 4
