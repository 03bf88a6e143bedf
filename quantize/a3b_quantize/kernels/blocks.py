"""IQ4_NL and Q4_0: blocks of 32 weights under a float16 scale each, or groups of neighbouring blocks that share one.

The search tries a row of inverse scales with a weighted least-squares scale for each, as ggml's does (quantize_row_iq4_nl_impl and
make_qx_quants in ggml-quants.c), over a wider range: with the largest weight on the lowest or on the highest level, or clipped. It runs
over 64 blocks at once, one a vector lane. Weights are rounded against the scale as float16 holds it, so the error is never larger for the
same scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import EPSILON, half_bits, half_value, largest
from a3b_quantize.kernels.levels import Levels, Tries, code, errors, size, squares, sums
from a3b_quantize.kernels.linear import clamped

Bits = NDArray[np.int64]  # of float16, one a block
# y and w [32, 64]; peaks [64], the largest weight of each block's group, which y is divided by
Lanes = tuple[Floats, Floats, Floats]
Found = tuple[Bits, Floats]  # scales and errors [64]
Spare = Floats  # [8, 64]

BLOCKS = 64
# By how much a try must be better than those before, so that blocks alike get scales alike and not what float32 makes of them.
SURELY = number(1 + 3e-6)


@inlined
def load(x: Floats, first: Scalar, n: Scalar, group: Scalar, lanes: Lanes) -> None:
    """Fills y and peaks from n blocks of x, flat, and zeros beyond."""
    y, _, peaks = lanes
    for b in range(BLOCKS):
        start = (first + min(b, n - 1)) * 32
        high, low = ZERO, ZERO
        for j in range(32):
            value = x[start + j]
            high = value if value > high else high
            low = value if value < low else low
        peak = high if high > -low else low
        peaks[b] = peak if b < n and abs(peak) >= EPSILON else ZERO
    if group > 1:
        for start in range(0, BLOCKS, group):
            peak = ZERO
            for b in range(start, start + group):
                peak = peaks[b] if abs(peaks[b]) > abs(peak) else peak
            peaks[start : start + group] = peak
    for b in range(BLOCKS):
        start, inverse = (first + min(b, n - 1)) * 32, ONE / peaks[b] if peaks[b] != 0 and b < n else ZERO
        for j in range(32):
            y[j, b] = x[start + j] * inverse


@inlined
def weigh(importance: Floats, first: Scalar, per_row: Scalar, spreads: Floats, lanes: Lanes) -> None:
    """Fills w: importance times the root of the block's spread, given as it is in y, plus the square."""
    y, w, _ = lanes
    for b in range(BLOCKS):
        start = (first + b) % per_row * 32
        for j in range(32):
            w[j, b] = importance[start + j]
    for j in range(32):
        for b in range(BLOCKS):
            w[j, b] *= np.sqrt(spreads[b] + y[j, b] * y[j, b])


@inlined
def weigh_by_square(spreads: Floats, lanes: Lanes) -> None:
    """Fills w without importance. ggml takes the square; the mean square of the block beside it lowers the plain error too."""
    y, w, _ = lanes
    for j in range(32):
        for b in range(BLOCKS):
            w[j, b] = y[j, b] * y[j, b] + np.float32(0.5) * spreads[b]


@inlined
def spreads_of_blocks(lanes: Lanes, spreads: Floats) -> None:
    """Twice the mean square of each block."""
    y, _, _ = lanes
    for b in range(BLOCKS):
        spreads[b] = ZERO
    for j in range(32):
        for b in range(BLOCKS):
            spreads[b] += np.float32(2 / 32) * y[j, b] * y[j, b]


@inlined
def unite(group: Scalar, values: Floats) -> None:
    """Each block of a group gets the sum over the group."""
    if group > 1:
        for start in range(0, BLOCKS, group):
            total = ZERO
            for b in range(start, start + group):
                total += values[b]
            values[start : start + group] = total


@inlined
def search(levels: Levels, tries: Tries, group: Scalar, lanes: Lanes, spare: Spare) -> None:
    """Fills spare[0] and spare[1]: the best scale with the largest weight on the lowest level, and on the highest.

    The better of the two, after codes are made anew with it, takes its own place.
    """
    y, w, _ = lanes
    best, gains, inverses, sx, sq = spare[2], spare[3], spare[4], spare[5], spare[6]
    down, up, _, _, again = tries
    for b in range(BLOCKS):
        spare[0, b], spare[1, b], best[b], gains[b] = ZERO, ZERO, ZERO, ZERO
    for t in range(down + up):
        multiple, side = size(levels, tries, t), 0 if t < down else 1
        for b in range(BLOCKS):
            inverses[b] = multiple
        sums(levels, y, w, inverses, sx, sq)
        unite(group, sx)
        unite(group, sq)
        most = spare[2 + side]
        for b in range(BLOCKS):
            better, scale = sx[b] * sx[b] > most[b] * sq[b] * SURELY, sx[b] / sq[b]
            spare[side, b] = scale if better else spare[side, b]
            most[b] = scale * sx[b] if better else most[b]
    for _ in range(again):
        for b in range(BLOCKS):
            scale = spare[0, b] if best[b] >= gains[b] else spare[1, b]
            inverses[b] = ONE / scale if scale != 0 else ZERO
        sums(levels, y, w, inverses, sx, sq)
        unite(group, sx)
        unite(group, sq)
        for b in range(BLOCKS):
            below, scale = best[b] >= gains[b], sx[b] / sq[b]
            better = sx[b] * sx[b] > max(best[b], gains[b]) * sq[b] * SURELY
            spare[0, b] = scale if better & below else spare[0, b]
            spare[1, b] = scale if better & (not below) else spare[1, b]
            best[b] = scale * sx[b] if better & below else best[b]
            gains[b] = scale * sx[b] if better & (not below) else gains[b]


@inlined
def settle(levels: Levels, group: Scalar, lanes: Lanes, found: Found, spare: Spare) -> None:
    """Fills found: of the two scales (or their neighbours among subnormals) the float16 with the least weighted error.

    Zero only where zeros are the nearest that can be written. Infinity when neither fits.
    """
    y, w, peaks = lanes
    bits, least = found
    scales, inverses, new = spare[2], spare[3], spare[4]
    squares(y, w, least)
    unite(group, least)
    subnormal = False
    for b in range(BLOCKS):
        first, second = half_bits(spare[0, b] * peaks[b]), half_bits(spare[1, b] * peaks[b])
        # with one try out of range the other may still fit
        infinite = (first & 0x7FFF) >= 0x7C00 and ((second & 0x7FFF) >= 0x7C00 or spare[1, b] == 0)
        bits[b] = 0x7C00 if infinite else 0
        subnormal |= peaks[b] != 0 and ((first & 0x7FFF) < 0x400 or (second & 0x7FFF) < 0x400)
    for attempt in range(4 if subnormal else 2):
        side, more = attempt % 2, attempt // 2
        for b in range(BLOCKS):
            tried = half_bits(spare[side, b] * peaks[b])
            tried += more if (tried & 0x7FFF) <= 0x400 else 0
            fits = 0 < (tried & 0x7FFF) < 0x7C00 and peaks[b] != 0
            scales[b] = half_value(tried) / peaks[b] if fits else ZERO
            inverses[b] = ONE / scales[b] if fits else ZERO
        errors(levels, y, w, scales, inverses, new)
        unite(group, new)
        for b in range(BLOCKS):
            if scales[b] != 0 and new[b] < least[b]:
                least[b] = new[b]
                bits[b] = half_bits(spare[side, b] * peaks[b])
                bits[b] += more if (bits[b] & 0x7FFF) <= 0x400 else 0


@inlined
def vanished(found: Found, lanes: Lanes) -> bool:
    """Whether a block became zeros; its weights then count by their square, which keeps the largest.

    Without a level 0, weights that hardly count among zeros that do fit best when they vanish.
    """
    y, w, peaks = lanes
    any_lost = False
    for b in range(BLOCKS):
        if peaks[b] != 0 and found[0][b] == 0:
            any_lost = True
            for j in range(32):
                w[j, b] = y[j, b] * y[j, b]
    return any_lost


@inlined
def encode(levels: Levels, b: Scalar, lanes: Lanes, bits: Bits, codes: Bytes, to: Bytes) -> None:
    """Fills to [18]: float16 scale, 16 bytes with the codes of the first 16 weights in the low halves, of the others in the high."""
    y, _, peaks = lanes
    inverse = peaks[b] / half_value(bits[b]) if 0 < (bits[b] & 0x7FFF) < 0x7C00 else ZERO
    for j in range(32):
        codes[j] = np.uint8(code(levels, inverse * y[j, b]))
    to[0], to[1] = bits[b] & 255, bits[b] >> 8
    for j in range(16):
        to[2 + j] = codes[j] | codes[j + 16] << 4


@inlined
def memory() -> tuple[Lanes, Found, Spare]:
    """Arrays for 64 blocks."""
    lanes = np.zeros((32, 64), np.float32), np.zeros((32, 64), np.float32), np.zeros(64, np.float32)
    return lanes, (np.zeros(64, np.int64), np.zeros(64, np.float32)), np.zeros((8, 64), np.float32)


@inlined
def tries_of_iq4_nl(effort: Scalar) -> Tries:
    """Found by measuring: the range matters more than the number of tries."""
    if effort == 1:
        return 8, 8, np.float32(0.75), np.float32(1.5), 0
    if effort == 2:
        return 12, 12, np.float32(0.7), np.float32(1.7), 1
    return 28, 28, np.float32(0.65), np.float32(1.9), 2


@compiled
def iq4_nl(rows: Floats, importance: Floats, weighted: bool, effort: int, group: int, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 32 * 18]: float16 scale, 16 bytes of two codes.

    group: how many neighbouring blocks of a row share a scale, 1, 2 or 4; the last of a row may be fewer.
    """
    lanes, found, spare = memory()
    codes, levels, tries = np.zeros(32, np.uint8), (True, np.float32(127), np.float32(113)), tries_of_iq4_nl(effort)
    x, per_row, flat = rows.reshape(-1), rows.shape[1] // 32, out.reshape(-1)
    line = per_row if group > 1 else per_row * rows.shape[0]  # groups end where rows end
    for start in range(0, per_row * rows.shape[0], line):
        for first in range(start, start + line, BLOCKS):
            n = min(BLOCKS, start + line - first)
            load(x, first, n, group, lanes)
            spreads_of_blocks(lanes, spare[0])
            if weighted:
                weigh(importance, first, per_row, spare[0], lanes)
            else:
                weigh_by_square(spare[0], lanes)
            for attempt in range(2):
                if attempt == 0 or (weighted and vanished(found, lanes)):
                    search(levels, tries, group, lanes, spare)
                    settle(levels, group, lanes, found, spare)
            for b in range(n):
                encode(levels, b, lanes, found[0], codes, flat[(first + b) * 18 : (first + b) * 18 + 18])


@inlined
def mean_square(x: Floats) -> Scalar:
    """Mean square of a row, in float64, which holds the square of every float32."""
    total = 0.0
    for j in range(x.shape[0]):
        total += np.float64(x[j]) * np.float64(x[j])
    return total / x.shape[0]


@inlined
def spreads_of_rows(rows: Floats, first: Scalar, lanes: Lanes, spreads: Floats) -> None:
    """The mean square of each block's row, in units of the block's peak."""
    per_row, row, square = rows.shape[1] // 32, -1, 0.0
    for b in range(BLOCKS):
        own = min((first + b) // per_row, rows.shape[0] - 1)
        if own != row:
            row, square = own, mean_square(rows[own])
        peak = np.float64(lanes[2][b])
        spreads[b] = np.float32(min(square / (peak * peak), 1e30)) if peak != 0 else ZERO


@inlined
def quick(x: Floats, codes: Bytes, to: Bytes) -> bool:
    """Fills to [18] from one block without a search, as ggml does (quantize_row_q4_0_ref), and then fits the scale to the codes.

    False where the scale would be coarse or out of range, and nothing is filled.
    """
    peak, sx, sq, bits, inverse = largest(x, 0, 32), ZERO, ZERO, 0, ZERO
    if abs(peak) >= EPSILON:
        inverse = np.float32(-8) / peak
        for j in range(32):
            value = x[j] * inverse
            q = clamped(value, np.float32(-8), np.float32(7))
            sx += q * value
            sq += q * q
        bits = half_bits(peak / np.float32(-8) * (sx / sq))
        if not 0x400 <= bits & 0x7FFF < 0x7C00:
            return False
        inverse = ONE / half_value(bits)
    for j in range(32):
        codes[j] = np.uint8(np.int32(clamped(x[j] * inverse, np.float32(-8), np.float32(7)) + np.float32(8)))
    to[0], to[1] = bits & 255, bits >> 8
    for j in range(16):
        to[2 + j] = codes[j] | codes[j + 16] << 4
    return True


@inlined
def tries_of_q4_0(effort: Scalar) -> Tries:
    """Found by measuring."""
    if effort == 1:
        return 9, 9, np.float32(0.8), np.float32(1.4), 0
    if effort == 2:
        return 12, 12, np.float32(0.8), np.float32(1.4), 1
    return 24, 24, np.float32(0.75), np.float32(1.7), 2


@compiled
def q4_0(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """As iq4_nl, with levels -8..7. Without importance all weights count alike, and effort 1 does not search."""
    lanes, found, spare = memory()
    codes, levels, tries = np.zeros(32, np.uint8), (False, np.float32(8), np.float32(7.5)), tries_of_q4_0(effort)
    x, per_row, flat = rows.reshape(-1), rows.shape[1] // 32, out.reshape(-1)
    lanes[1][:] = 1
    for first in range(0, per_row * rows.shape[0], BLOCKS):
        n, done = min(BLOCKS, per_row * rows.shape[0] - first), effort == 1 and not weighted
        for b in range(first, first + n if done else first):
            done &= quick(x[b * 32 : b * 32 + 32], codes, flat[b * 18 : b * 18 + 18])
        if done:
            continue
        load(x, first, n, 1, lanes)
        if weighted:
            spreads_of_rows(rows, first, lanes, spare[0])
            weigh(importance, first, per_row, spare[0], lanes)
        search(levels, tries, 1, lanes, spare)
        settle(levels, 1, lanes, found, spare)
        for b in range(n):
            encode(levels, b, lanes, found[0], codes, flat[(first + b) * 18 : (first + b) * 18 + 18])
