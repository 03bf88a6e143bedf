"""Q6_K, Q3_K and IQ4_XS: 256 weights in 16 or 8 blocks, each with a scale of 8 or 6 bits under a common float16 scale.

The search tries a row of inverse scales for each block with a weighted least-squares scale for each, as ggml's does (make_qx_quants and
quantize_row_iq4_nl_impl in ggml-quants.c), over a wider range: with the largest weight on the lowest or on the highest level, or clipped.
It runs over all blocks of 8 super-blocks at once, one block a vector lane. The common scale fits the blocks' scales best in the sense of
least squares, each block's part of it is the best of the three nearest, and with more effort several common scales are tried and fitted
anew to the codes found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import COARSE, EPSILON, half_bits, half_value
from a3b_quantize.kernels.levels import Levels, Tries, code, errors, size, squares, sums
from a3b_quantize.kernels.linear import clamped
from a3b_quantize.kernels.packing import pack_q3, pack_q6, pack_xs

Bits = NDArray[np.int64]  # of float16, one a super-block
# y and w [weights of a block, blocks]; peaks, scales and curves [blocks], in units of the super-block's largest weight; that [8]
Lanes = tuple[Floats, Floats, Floats, Floats, Floats, Floats]
Found = tuple[Bits, Floats, Floats]  # common scales [8]; parts [blocks], whole numbers; their errors [blocks]
Tried = tuple[Bits, Floats, Floats, Bits]  # the same, and flags [8]
Spare = tuple[Floats, Floats, Floats, Floats, Floats]  # [blocks] each
# Parts are -most..most-1; rooted: importance counts times a root; how many common scales are tried; how often they are fitted anew
Plan = tuple[Levels, Tries, Scalar, bool, Scalar, Scalar]

EXACT = number(1e-6)
# By how much a try must be better than those before, so that blocks alike get scales alike and not what float32 makes of them.
SURELY = number(1 + 3e-6)
# A block that is smaller than this share of its super-block's largest weight has no part but 0.
VANISHING = number(1e-6)


@inlined
def load(rows: Floats, first: Scalar, importance: Floats, weighted: bool, rooted: bool, lanes: Lanes) -> None:
    """Fills y, w, peaks and sizes from 8 super-blocks of the rows, counted through; those beyond the end are zeros."""
    y, w, peaks, _, _, sizes = lanes
    depth, n, per_row = y.shape[0], y.shape[1] // 8, rows.shape[1] // 256
    for s in range(8):
        r, start, most, square = (first + s) // per_row, (first + s) % per_row * 256, ZERO, ZERO
        beyond = r >= rows.shape[0]
        x = rows[0 if beyond else r, start : start + 256]
        for j in range(256):
            most = max(most, abs(x[j]))
        sizes[s] = most if most >= EPSILON and not beyond else ZERO
        inverse = ONE / most if sizes[s] > 0 else ZERO
        for b in range(n):
            for j in range(depth):
                y[j, n * s + b] = x[b * depth + j] * inverse
                w[j, n * s + b] = importance[start + b * depth + j] if weighted else ONE
        for j in range(256):
            square += (x[j] * inverse) * (x[j] * inverse)
        # without importance ggml takes the square; beside it the mean square lowers the plain error too, where codes are few
        mean, square = square / np.float32(256) if rooted else ZERO, square * np.float32(2 / 256)
        for j in range(depth):
            for b in range(n * s, n * s + n):
                root = np.sqrt(square + y[j, b] * y[j, b]) if rooted else ONE
                w[j, b] = w[j, b] * root if weighted else y[j, b] * y[j, b] + mean
    for b in range(8 * n):
        high, low = ZERO, ZERO
        for j in range(depth):
            high = y[j, b] if y[j, b] > high else high
            low = y[j, b] if y[j, b] < low else low
        peak = high if high > -low else low
        peaks[b] = peak if abs(peak) >= VANISHING else ZERO


@inlined
def search(levels: Levels, tries: Tries, lanes: Lanes, spare: Spare) -> None:
    """Fills scales and curves [blocks]: for each block the best scale, and how its error grows with the square of a change of that."""
    y, w, peaks, scales, curves, _ = lanes
    best, reciprocals, inverses, sx, sq = spare
    for b in range(scales.shape[0]):
        reciprocals[b] = ONE / peaks[b] if peaks[b] != 0 else ZERO
        best[b], scales[b], curves[b] = ZERO, ZERO, ZERO
    n = tries[0] + tries[1]
    for t in range(n + tries[4]):
        if t < n:
            multiple = size(levels, tries, t)
            for b in range(scales.shape[0]):
                inverses[b] = multiple * reciprocals[b]
        else:
            for b in range(scales.shape[0]):
                inverses[b] = ONE / scales[b] if scales[b] != 0 else ZERO
        sums(levels, y, w, inverses, sx, sq)
        for b in range(scales.shape[0]):
            better, scale = sx[b] * sx[b] > best[b] * sq[b] * SURELY, sx[b] / sq[b]
            scales[b] = scale if better else scales[b]
            curves[b] = sq[b] if better else curves[b]
            best[b] = scale * sx[b] if better else best[b]
    for b in range(scales.shape[0]):
        scales[b] = scales[b] if peaks[b] != 0 else ZERO


@inlined
def unite(most: Scalar, lanes: Lanes, steps: Scalar, less: Scalar, bits: Bits) -> bool:
    """Fills bits [8], common scales that fit the scales best in the sense of least squares; whether one is coarse.

    less: by how much the largest part shall be smaller than `most`; steps: how many sizes around that are tried on either side.
    """
    _, _, _, scales, curves, sizes = lanes
    n, coarse = scales.shape[0] // 8, False
    for s in range(8):
        top = ZERO
        for b in range(n * s, n * s + n):
            top = scales[b] if abs(scales[b]) > abs(top) else top
        bits[s] = 0
        if top == 0:
            continue
        unit, best = -top / (most - np.float32(less)), ZERO
        for step in range(-steps, steps + 1):
            inverse, sx, sq = (np.float32(0.1) * np.float32(step) - most) / top, ZERO, ZERO
            for b in range(n * s, n * s + n):
                part = clamped(inverse * scales[b], -most, most - ONE)
                weighted = curves[b] * part
                sx += weighted * scales[b]
                sq += weighted * part
            if steps > 0 and sx * sx > best * sq:
                unit = sx / sq
                best = unit * sx
        bits[s] = half_bits(unit * sizes[s])
        coarse |= (bits[s] & 0x7FFF) < COARSE
    return coarse


@inlined
def units_of(bits: Bits, lanes: Lanes, units: Floats) -> None:
    """Fills units [blocks]: the common scale of each block, in units of the super-block's largest weight; 0 where none can be."""
    sizes, n = lanes[5], units.shape[0] // 8
    for s in range(8):
        magnitude = bits[s] & 0x7FFF
        unit = half_value(bits[s]) / sizes[s] if 0 < magnitude < 0x7C00 and sizes[s] > 0 else ZERO
        for b in range(n * s, n * s + n):
            units[b] = unit


@inlined
def share(plan: Plan, lanes: Lanes, found: Found, spare: Spare) -> None:
    """Fills parts [blocks], each block's scale in units of the common one, the best of the three nearest; and least [blocks], its error."""
    y, w, _, scales, _, _ = lanes
    levels, _, most, _, _, _ = plan
    bits, parts, least = found
    units, tried, inverses, tried_scales, new = spare
    units_of(bits, lanes, units)
    squares(y, w, least)
    for b in range(parts.shape[0]):
        parts[b] = ZERO
    for attempt in range(-1, 2):
        for b in range(parts.shape[0]):
            near = clamped(scales[b] / units[b], -most, most - ONE) if units[b] != 0 else ZERO
            near += np.float32(attempt)
            near = near if near > -most else -most
            near = near if near < most - ONE else most - ONE
            tried[b] = near if units[b] != 0 and scales[b] != 0 else ZERO
            tried_scales[b] = units[b] * tried[b]
            inverses[b] = ONE / tried_scales[b] if tried[b] != 0 else ZERO
        errors(levels, y, w, tried_scales, inverses, new)
        for b in range(parts.shape[0]):
            better = (new[b] < least[b]) & (tried[b] != 0)
            parts[b] = tried[b] if better else parts[b]
            least[b] = new[b] if better else least[b]


@inlined
def refit(levels: Levels, lanes: Lanes, found: Found, bits: Bits, spare: Spare) -> None:
    """Fills bits [8]: the common scales that fit best the codes and parts found."""
    y, w, _, _, _, sizes = lanes
    old, parts, _ = found
    units, inverses, sx, sq, _ = spare
    n = parts.shape[0] // 8
    units_of(old, lanes, units)
    for b in range(parts.shape[0]):
        inverses[b] = ONE / (units[b] * parts[b]) if units[b] * parts[b] != 0 else ZERO
    sums(levels, y, w, inverses, sx, sq)
    for s in range(8):
        above, below = ZERO, ZERO
        for b in range(n * s, n * s + n):
            above += parts[b] * sx[b]
            below += parts[b] * parts[b] * sq[b]
        bits[s] = half_bits(above / below * sizes[s]) if below > 0 else old[s]


@inlined
def keep(found: Found, new: Found) -> bool:
    """Takes over the super-blocks whose error is smaller; whether there are any."""
    bits, parts, least = found
    new_bits, new_parts, new_least = new
    n, any_better = parts.shape[0] // 8, False
    for s in range(8):
        before, after = ZERO, ZERO
        for b in range(n * s, n * s + n):
            before += least[b]
            after += new_least[b]
        if after < before:
            any_better = True
            bits[s] = new_bits[s]
            for b in range(n * s, n * s + n):
                parts[b], least[b] = new_parts[b], new_least[b]
    return any_better


@inlined
def exact(lanes: Lanes, least: Floats, whole: Floats, flags: Bits) -> bool:
    """Flags the super-blocks with so little error left that the rounding of their common scale is all of it; whether there are any."""
    y, w, _, _, _, sizes = lanes
    n, found = least.shape[0] // 8, False
    squares(y, w, whole)
    for s in range(8):
        left, all_of_it = ZERO, ZERO
        for b in range(n * s, n * s + n):
            left += least[b]
            all_of_it += whole[b]
        flags[s] = sizes[s] > 0 and left <= EXACT * all_of_it
        found |= flags[s] > 0
    return found


@inlined
def fit(plan: Plan, lanes: Lanes, found: Found, new: Tried, spare: Spare) -> None:
    """Fills found.

    Where a common scale is coarse its neighbour is tried too; where hardly any error is left, scales that make the largest part smaller.
    """
    levels, tries, most, _, attempts, rounds = plan
    bits, flags = found[0], new[3]
    search(levels, tries, lanes, spare)
    found[2][:] = np.inf
    step, more, coarse = 0, attempts, False
    while step <= more + rounds:  # one loop, so that its body is compiled once
        if step > more:
            refit(levels, lanes, found, new[0], spare)
        else:
            coarse |= unite(most, lanes, 9 if step == 0 and most < 128 else 0, max(step - 1, 0), new[0])
        for s in range(8):
            if step == 1:
                new[0][s] = bits[s] + (1 if (bits[s] & 0x7FFF) < COARSE else 0)
            elif attempts < step <= more and flags[s] == 0:  # what is tried for one must not depend on its neighbours
                new[0][s] = bits[s]
        share(plan, lanes, new[:3], spare)
        better = keep(found, new[:3])
        if step == 0 and exact(lanes, found[2], spare[0], flags):
            more = max(8, attempts)
        if step > more and not better:
            break
        step += 2 if step == 0 and not coarse else 1


@inlined
def vanished(lanes: Lanes, parts: Floats) -> bool:
    """Whether a super-block became zeros; its weights then count by their square, which keeps the largest.

    Without a level 0, weights that hardly count among zeros that do fit best when they vanish.
    """
    y, w, _, _, _, sizes = lanes
    n, found = parts.shape[0] // 8, False
    for s in range(8):
        if sizes[s] > 0 and not parts[n * s : n * s + n].any():
            found = True
            for j in range(y.shape[0]):
                for b in range(n * s, n * s + n):
                    w[j, b] = y[j, b] * y[j, b]
    return found


@inlined
def encode(s: Scalar, levels: Levels, lanes: Lanes, found: Found, codes: Bytes) -> None:
    """Fills codes [256] of super-block s."""
    y, sizes = lanes[0], lanes[5]
    bits, parts, _ = found
    depth, n = y.shape[0], y.shape[1] // 8
    for b in range(n):
        part = parts[n * s + b]
        scale = half_value(bits[s]) / sizes[s] * part if part != 0 else ZERO
        inverse = ONE / scale if scale != 0 else ZERO
        for j in range(depth):
            codes[depth * b + j] = np.uint8(code(levels, inverse * y[j, n * s + b]))


@inlined
def memory(depth: Scalar, n: Scalar) -> tuple[Lanes, Found, Tried, Spare]:
    """Arrays for n blocks of `depth` weights in 8 super-blocks."""
    y, w, peaks = np.zeros((depth, n), np.float32), np.zeros((depth, n), np.float32), np.zeros(n, np.float32)
    lanes = y, w, peaks, np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(8, np.float32)
    found = np.zeros(8, np.int64), np.zeros(n, np.float32), np.zeros(n, np.float32)
    new = np.zeros(8, np.int64), np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(8, np.int64)
    a, b, c = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    return lanes, found, new, (a, b, c, np.zeros(n, np.float32), np.zeros(n, np.float32))


@inlined
def tries_of(effort: Scalar, first: Tries, second: Tries, third: Tries) -> Tries:
    return first if effort == 1 else second if effort == 2 else third


@compiled
def q6_k(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 256 * 210]: 192 bytes of codes, 16 int8, float16."""
    codes, per_row = np.zeros(256, np.uint8), rows.shape[1] // 256
    lanes, found, new, spare = memory(16, 128)
    tries = tries_of(
        effort,
        (18, 0, np.float32(0.85), np.float32(1.2), 0),
        (24, 8, np.float32(0.8), np.float32(1.3), 1),
        (32, 32, np.float32(0.75), np.float32(1.6), 2),
    )
    plan = (False, np.float32(32), np.float32(31.5)), tries, np.float32(128), False, 1 + 4 * (effort - 1) ** 2, effort - 1
    for first in range(0, rows.shape[0] * per_row, 8):
        load(rows, first, importance, weighted, False, lanes)
        fit(plan, lanes, found, new, spare)
        for s in range(min(8, rows.shape[0] * per_row - first)):
            at = (first + s) % per_row * 210
            to = out[(first + s) // per_row, at : at + 210]
            encode(s, plan[0], lanes, found, codes)
            pack_q6(codes, to)
            for b in range(16):
                to[192 + b] = np.uint8(np.int64(found[1][16 * s + b]) & 255)
            to[208], to[209] = found[0][s] & 255, found[0][s] >> 8


@compiled
def q3_k(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """As q6_k, out [n, columns / 256 * 110]: 32 bytes of third bits, 64 of the lower two, 12 of parts, float16."""
    codes, per_row = np.zeros(256, np.uint8), rows.shape[1] // 256
    lanes, found, new, spare = memory(16, 128)
    tries = tries_of(
        effort,
        (8, 8, np.float32(0.8), np.float32(1.4), 0),
        (10, 10, np.float32(0.75), np.float32(1.6), 0),
        (24, 24, np.float32(0.7), np.float32(1.9), 2),
    )
    plan = (False, np.float32(4), np.float32(3.5)), tries, np.float32(32), True, 1 + 2 * (effort - 1) ** 2, effort
    for first in range(0, rows.shape[0] * per_row, 8):
        load(rows, first, importance, weighted, True, lanes)
        fit(plan, lanes, found, new, spare)
        for s in range(min(8, rows.shape[0] * per_row - first)):
            at = (first + s) % per_row * 110
            to = out[(first + s) // per_row, at : at + 110]
            encode(s, plan[0], lanes, found, codes)
            pack_q3(codes, found[1][16 * s : 16 * s + 16], to)
            to[108], to[109] = found[0][s] & 255, found[0][s] >> 8


@compiled
def iq4_xs(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """As q6_k, out [n, columns / 256 * 136]: float16 scale, 2 bytes with the high 2 bits of 8 parts, 4 with the low 4, 128 of codes."""
    codes, per_row = np.zeros(256, np.uint8), rows.shape[1] // 256
    lanes, found, new, spare = memory(32, 64)
    tries = tries_of(
        effort,
        (8, 8, np.float32(0.75), np.float32(1.5), 0),
        (12, 12, np.float32(0.7), np.float32(1.7), 1),
        (24, 24, np.float32(0.7), np.float32(1.7), 2),
    )
    plan = (True, np.float32(127), np.float32(113)), tries, np.float32(32), True, 1 + 5 * (effort - 1), effort
    for first in range(0, rows.shape[0] * per_row, 8):
        load(rows, first, importance, weighted, True, lanes)
        for attempt in range(2):
            if attempt == 0 or (weighted and vanished(lanes, found[1])):
                fit(plan, lanes, found, new, spare)
        for s in range(min(8, rows.shape[0] * per_row - first)):
            at = (first + s) % per_row * 136
            to = out[(first + s) // per_row, at : at + 136]
            encode(s, plan[0], lanes, found, codes)
            to[0], to[1] = found[0][s] & 255, found[0][s] >> 8
            pack_xs(codes, found[1][8 * s : 8 * s + 8], to)
