"""Q4_K and Q5_K: 8 blocks of 32 weights, each with a 6-bit scale and a 6-bit offset under common float16 ones.

The search is ggml's (make_qkx2_quants and make_qkx3_quants in ggml-quants.c): for each of a row of inverse scales the codes, then the
weighted least-squares scale and offset for them. It runs over the 64 blocks of 8 super-blocks at once, one block a vector lane. The error
comes from the same sums, where ggml goes over the block again. Of each block's scale and offset the 6-bit values below and above are tried
together, the pair with the least error is kept. With more effort the common ones are fitted anew to the codes, and several are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_quantize.kernels.compiled import ONE, ZERO, Bytes, Floats, Scalar, compiled, inlined, number
from a3b_quantize.kernels.half import COARSE, EPSILON, half_bits, half_value
from a3b_quantize.kernels.linear import clamped

Bits = NDArray[np.int64]  # of float16
# y and w [32, 64]; scales and offsets [64], in units of the super-block's largest weight; that [8]
Lanes = tuple[Floats, Floats, Floats, Floats, Floats]
# Common scales and offsets [2, 8]; parts of them [2, 64], whole numbers; errors [64]
Found = tuple[Bits, Floats, Floats]
Tried = tuple[Bits, Floats, Floats, Bits]  # the same, and flags [8]
Spare = Floats  # [10, 64]
# Codes 0..top; number of starts, and the last as a share of the lowest weight; number, first and last of what is added to top; rounds;
# number of common scales and offsets that are tried
Plan = tuple[Scalar, Scalar, Scalar, Scalar, Scalar, Scalar, Scalar, Scalar]

MOST = number(63)
BLOCKS = 64  # in 8 super-blocks
# Codes that spread less than this (as a share of their mean square) are one code: a slope through them would be noise.
FLAT = number(1e-5)
# A gain this much larger (as a share), or an error this small, is rounding of float32 or of scales.
EXACT = number(1e-6)


@inlined
def load(rows: Floats, first: Scalar, importance: Floats, weighted: bool, lanes: Lanes) -> None:
    """Fills y, w and sizes from 8 super-blocks of the rows, counted through; those beyond the end are zeros."""
    y, w, _, _, sizes = lanes
    per_row = rows.shape[1] // 256
    for s in range(8):
        r, start, most, square = (first + s) // per_row, (first + s) % per_row * 256, ZERO, ZERO
        beyond = r >= rows.shape[0]
        x = rows[0 if beyond else r, start : start + 256]
        for j in range(256):
            most = max(most, abs(x[j]))
        sizes[s] = most if most >= EPSILON and not beyond else ZERO
        inverse = ONE / most if sizes[s] > 0 else ZERO
        for b in range(8):
            rms = ZERO
            for j in range(32):
                value = x[32 * b + j] * inverse
                y[j, 8 * s + b] = value
                rms += value * value
            square += rms
            rms = np.sqrt(rms / np.float32(32))
            for j in range(32):
                w[j, 8 * s + b] = importance[start + 32 * b + j] if weighted else rms + abs(y[j, 8 * s + b])
        if weighted:
            square *= np.float32(2 / 256)
            for j in range(32):
                for b in range(8 * s, 8 * s + 8):
                    w[j, b] *= np.sqrt(square + y[j, b] * y[j, b])


@inlined
def sums(top: Scalar, lanes: Lanes, inverses: Floats, low: Floats, sl: Floats, sll: Floats, sxl: Floats) -> None:
    """Fills sums over each block, with codes q of inverse * (y - low): of w q, w q q and w q y."""
    y, w, _, _, _ = lanes
    for b in range(BLOCKS):
        sl[b], sll[b], sxl[b] = ZERO, ZERO, ZERO
    for part in range(0, 32, 8):
        for b in range(BLOCKS):
            a1, a2, a3 = ZERO, ZERO, ZERO
            for j in range(8):
                q = clamped(inverses[b] * (y[part + j, b] - low[b]), ZERO, top)
                wq = w[part + j, b] * q
                a1 += wq
                a2 += wq * q
                a3 += wq * y[part + j, b]
            sl[b] += a1
            sll[b] += a2
            sxl[b] += a3


@inlined
def search(plan: Plan, lanes: Lanes, spare: Spare) -> None:
    """Fills scales and offsets, both at least 0: value = scale * code - offset.

    Codes start from the lowest weight or a share of it, and reach up to `sizes` of the range above that: weights that hardly count may be
    clipped at either end. The last rounds start from the best that was found.
    """
    y, w, scales, offsets, _ = lanes
    top, n_lows, last_low, n_sizes, first, last, rounds, _ = plan
    low, high, sw, sx, best = spare[0], spare[1], spare[2], spare[3], spare[4]
    inverses, sl, sll, sxl, lowest = spare[5], spare[6], spare[7], spare[8], spare[9]
    for b in range(BLOCKS):
        lowest[b], high[b], sw[b], sx[b], best[b] = ZERO, y[0, b], ZERO, ZERO, -ONE
    for j in range(32):
        for b in range(BLOCKS):
            value = y[j, b]
            lowest[b] = value if value < lowest[b] else lowest[b]
            high[b] = value if value > high[b] else high[b]
            sw[b] += w[j, b]
            sx[b] += w[j, b] * value
    for b in range(BLOCKS):
        scales[b], offsets[b] = (high[b] - lowest[b]) / top, -lowest[b]
    for t in range(n_lows * n_sizes + rounds):
        number, at = t // n_sizes, t % n_sizes
        if number < n_lows:
            size = top + first + (last - first) * np.float32(at) / np.float32(n_sizes - 1)
            shrunk = ONE - (ONE - last_low) * np.float32(number) / np.float32(max(n_lows - 1, 1))
            for b in range(BLOCKS):
                # within a row of sizes the codes start from the best offset so far, as in ggml
                low[b] = lowest[b] * shrunk if at == 0 or n_lows > 2 else low[b]
                inverses[b] = size / (high[b] - low[b]) if high[b] > low[b] else ZERO
        else:
            for b in range(BLOCKS):
                low[b], inverses[b] = -offsets[b], ONE / scales[b] if scales[b] > 0 else ZERO
        sums(top, lanes, inverses, low, sl, sll, sxl)
        for b in range(BLOCKS):
            spread = sw[b] * sll[b] - sl[b] * sl[b]
            tilted, moved = (sw[b] * sxl[b] - sx[b] * sl[b]) / spread, (sll[b] * sx[b] - sl[b] * sxl[b]) / spread
            sloped = (spread > FLAT * sw[b] * sll[b]) & (moved <= 0)
            slope, base = tilted if sloped else sxl[b] / sll[b], moved if sloped else ZERO
            gain = slope * sxl[b] + base * sx[b]
            better = (gain > best[b] + EXACT * abs(best[b])) & (slope > 0)
            scales[b] = slope if better else scales[b]
            offsets[b] = -base if better else offsets[b]
            best[b] = gain if better else best[b]
            low[b] = base if better else low[b]


@inlined
def units_of(bits: Bits, lanes: Lanes, units: Floats, steps: Floats) -> None:
    """Fills units and steps [64]: the common scale and offset of each block, in units of the super-block's largest weight."""
    sizes = lanes[4]
    for s in range(8):
        holds = sizes[s] > 0 and bits[0, s] < 0x7C00 and bits[1, s] < 0x7C00
        for b in range(8 * s, 8 * s + 8):
            units[b] = half_value(bits[0, s]) / sizes[s] if holds else ZERO
            steps[b] = half_value(bits[1, s]) / sizes[s] if holds else ZERO


@inlined
def share(top: Scalar, lanes: Lanes, found: Found, spare: Spare) -> None:
    """Fills parts, each block's scale and offset in units of the common ones, and least, its weighted squared error."""
    y, w, scales, offsets, _ = lanes
    bits, parts, least = found
    units, steps, tried, under, scale, offset, inverses, errors = (
        spare[0], spare[1], spare[2], spare[3], spare[4], spare[5], spare[6], spare[7],
    )  # fmt: skip
    units_of(bits, lanes, units, steps)
    for b in range(BLOCKS):
        parts[0, b], parts[1, b], least[b] = ZERO, ZERO, np.float32(np.inf)
    for attempt in range(4):
        more, deeper = np.float32(attempt % 2), np.float32(attempt // 2)
        for b in range(BLOCKS):
            tried[b] = min(np.floor(min(scales[b] / units[b], MOST)) + more, MOST) if units[b] > 0 else ZERO
            under[b] = min(np.floor(min(offsets[b] / steps[b], MOST)) + deeper, MOST) if steps[b] > 0 else ZERO
            scale[b], offset[b], errors[b] = units[b] * tried[b], steps[b] * under[b], ZERO
            inverses[b] = ONE / scale[b] if scale[b] > 0 else ZERO
        for part in range(0, 32, 8):
            for b in range(BLOCKS):
                total = ZERO
                for j in range(8):
                    value = y[part + j, b] + offset[b]
                    off = value - scale[b] * clamped(inverses[b] * value, ZERO, top)
                    total += w[part + j, b] * off * off
                errors[b] += total
        for b in range(BLOCKS):
            better = errors[b] < least[b]
            parts[0, b] = tried[b] if better else parts[0, b]
            parts[1, b] = under[b] if better else parts[1, b]
            least[b] = errors[b] if better else least[b]


@inlined
def unite(lanes: Lanes, less: Scalar, shallower: Scalar, bits: Bits) -> bool:
    """Fills bits [2, 8]: common scales and offsets that make the largest part 63 - less and 63 - shallower; whether one is coarse."""
    _, _, scales, offsets, sizes = lanes
    coarse = False
    for s in range(8):
        largest, deepest = ZERO, ZERO
        for b in range(8 * s, 8 * s + 8):
            largest, deepest = max(largest, scales[b]), max(deepest, offsets[b])
        bits[0, s] = half_bits(largest / (MOST - np.float32(less)) * sizes[s])
        bits[1, s] = half_bits(deepest / (MOST - np.float32(shallower)) * sizes[s])
        coarse |= (sizes[s] > 0 and bits[0, s] < COARSE) or 0 < bits[1, s] < COARSE
    return coarse


@inlined
def refit(top: Scalar, lanes: Lanes, found: Found, bits: Bits, spare: Spare) -> None:
    """Fills bits [2, 8]: the common scales and offsets that fit best the codes and parts found, in the sense of least squares."""
    y, w, _, _, sizes = lanes
    old, parts, _ = found
    units, steps, inverses, low = spare[0], spare[1], spare[2], spare[3]
    sl, sll, sxl, sw, sx = spare[4], spare[5], spare[6], spare[7], spare[8]
    units_of(old, lanes, units, steps)
    for b in range(BLOCKS):
        scale = units[b] * parts[0, b]
        low[b], inverses[b] = -steps[b] * parts[1, b], ONE / scale if scale > 0 else ZERO
        sw[b], sx[b] = ZERO, ZERO
    sums(top, lanes, inverses, low, sl, sll, sxl)
    for j in range(32):
        for b in range(BLOCKS):
            sw[b] += w[j, b]
            sx[b] += w[j, b] * y[j, b]
    for s in range(8):
        aa, ab, bb, ay, by = ZERO, ZERO, ZERO, ZERO, ZERO
        for b in range(8 * s, 8 * s + 8):
            scale, offset = parts[0, b], parts[1, b]
            aa += scale * scale * sll[b]
            ab += scale * offset * sl[b]
            bb += offset * offset * sw[b]
            ay += scale * sxl[b]
            by += offset * sx[b]
        spread = aa * bb - ab * ab
        bits[0, s], bits[1, s] = old[0, s], old[1, s]
        if spread > FLAT * aa * bb:
            unit, step = (ay * bb - by * ab) / spread, (ay * ab - by * aa) / spread
            if unit > 0 and step > 0:
                bits[0, s], bits[1, s] = half_bits(unit * sizes[s]), half_bits(step * sizes[s])
        elif aa > 0 and bb <= 0:
            bits[0, s] = half_bits(ay / aa * sizes[s])


@inlined
def keep(found: Found, new: Found, first: bool) -> bool:
    """Takes over the super-blocks whose error is smaller, at first all; whether there are any."""
    bits, parts, least = found
    new_bits, new_parts, new_least = new
    any_better = False
    for s in range(8):
        before, after = ZERO, ZERO
        for b in range(8 * s, 8 * s + 8):
            before += least[b]
            after += new_least[b]
        if first or (after < before and new_bits[0, s] < 0x7C00 and new_bits[1, s] < 0x7C00):
            any_better = True
            bits[0, s], bits[1, s] = new_bits[0, s], new_bits[1, s]
            for b in range(8 * s, 8 * s + 8):
                parts[0, b], parts[1, b], least[b] = new_parts[0, b], new_parts[1, b], new_least[b]
    return any_better


@inlined
def exact(lanes: Lanes, least: Floats, flags: Bits) -> bool:
    """Flags the super-blocks with so little error left that the rounding of their common scale and offset is all; whether there are any."""
    y, w, _, _, sizes = lanes
    found = False
    for s in range(8):
        left, whole = ZERO, ZERO
        for b in range(8 * s, 8 * s + 8):
            left += least[b]
        if sizes[s] > 0 and left < np.float32(1e-2):
            for j in range(32):
                for b in range(8 * s, 8 * s + 8):
                    whole += w[j, b] * y[j, b] * y[j, b]
        flags[s] = sizes[s] > 0 and left <= EXACT * whole
        found |= flags[s] > 0
    return found


@inlined
def fit(plan: Plan, lanes: Lanes, found: Found, new: Tried, spare: Spare) -> None:
    """Fills found. Coarse common scales are tried together with their neighbours.

    Where hardly any error is left, the largest part may be smaller than 63 when that rounds better.
    """
    top, _, _, _, _, _, rounds, tries = plan
    bits, flags = found[0], new[3]
    search(plan, lanes, spare)
    found[2][:] = np.inf
    step, more, coarse = 0, tries + 2, False
    while step <= more + rounds:  # one loop, so that its body is compiled once
        if step > more:
            refit(top, lanes, found, new[0], spare)
        else:
            less = max(step - 3, 0)
            coarse |= unite(lanes, less, less, new[0])
        for s in range(8):
            d, m = bits[0, s], bits[1, s]
            if 1 <= step <= 3:
                new[0][0, s] = d + step % 2 if d < COARSE else d
                new[0][1, s] = m + step // 2 if 0 < m < COARSE else m
            elif tries + 2 < step <= more and flags[s] == 0:  # what is tried for one must not depend on its neighbours
                new[0][0, s], new[0][1, s] = d, m
        share(top, lanes, new[:3], spare)
        better = keep(found, new[:3], step == 0)
        if step == 0 or step == 3:
            more = max(tries + 2, 10) if exact(lanes, found[2], flags) else tries + 2
        if step > more and not better:
            break
        step += 4 if step == 0 and not coarse else 1


@inlined
def encode(s: Scalar, top: Scalar, lanes: Lanes, found: Found, codes: Bytes, to: Bytes) -> None:
    """Fills codes [256], and to [16] with the two float16 and 12 bytes of parts. Source: get_scale_min_k4 in ggml-quants.c."""
    y, sizes = lanes[0], lanes[4]
    bits, parts, _ = found
    d, m = bits[0, s], bits[1, s]
    holds = d < 0x7C00 and m < 0x7C00
    for b in range(8):
        scale, offset = parts[0, 8 * s + b], parts[1, 8 * s + b]
        inverse, moved = ZERO, ZERO
        if scale > 0 and holds:
            inverse, moved = ONE / (half_value(d) / sizes[s] * scale), half_value(m) / sizes[s] * offset
        for j in range(32):
            codes[b * 32 + j] = np.uint8(clamped(inverse * (y[j, 8 * s + b] + moved), ZERO, top))
    to[0], to[1], to[2], to[3] = d & 255, d >> 8, m & 255, m >> 8
    for b in range(4):
        a, c = np.int64(parts[0, 8 * s + b]), np.int64(parts[0, 8 * s + b + 4])
        e, g = np.int64(parts[1, 8 * s + b]), np.int64(parts[1, 8 * s + b + 4])
        to[4 + b] = a | (c >> 4) << 6
        to[8 + b] = e | (g >> 4) << 6
        to[12 + b] = (c & 15) | (g & 15) << 4


@inlined
def memory() -> tuple[Lanes, Found, Tried, Spare]:
    """Arrays for 8 super-blocks."""
    lanes = (
        np.zeros((32, 64), np.float32), np.zeros((32, 64), np.float32), np.zeros(64, np.float32), np.zeros(64, np.float32),
        np.zeros(8, np.float32),
    )  # fmt: skip
    found = np.zeros((2, 8), np.int64), np.zeros((2, 64), np.float32), np.zeros(64, np.float32)
    new = np.zeros((2, 8), np.int64), np.zeros((2, 64), np.float32), np.zeros(64, np.float32), np.zeros(8, np.int64)
    return lanes, found, new, np.zeros((10, 64), np.float32)


@inlined
def plan_of(top: Scalar, weighted: bool, effort: Scalar) -> Plan:
    """What is tried, found by measuring: with importance it pays to clip what hardly counts, without it hardly ever."""
    unit = (top + ONE) / np.float32(16)
    tries = 1 + 4 * (effort - 1) ** 2
    if weighted:
        if effort == 1:
            return top, 2, np.float32(0.8), 18, -ONE, np.float32(3) * unit, 1, tries
        if effort == 2:
            return top, 4, np.float32(0.6), 16, -ONE, np.float32(4) * unit, 2, tries
        return top, 5, np.float32(0.6), 26, -ONE, np.float32(6) * unit, 4, tries
    if effort == 1:
        return top, 1, ONE, 21, -ONE, (np.float32(1) if top < 31 else np.float32(4)), 0, tries
    if effort == 2:
        return top, 1, ONE, 37, -ONE, (np.float32(1.5) if top < 31 else np.float32(6)), 1, tries
    return top, 4, np.float32(0.7), 26, -ONE, np.float32(4) * unit, 2, tries


@compiled
def q4_k(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """rows [n, columns], importance [columns] (used when weighted), out [n, columns / 256 * 144]: two float16, 12 bytes, 128."""
    lanes, found, new, spare = memory()
    codes, plan, per_row = np.zeros(256, np.uint8), plan_of(np.float32(15), weighted, effort), rows.shape[1] // 256
    for first in range(0, rows.shape[0] * per_row, 8):
        load(rows, first, importance, weighted, lanes)
        fit(plan, lanes, found, new, spare)
        for s in range(min(8, rows.shape[0] * per_row - first)):
            at = (first + s) % per_row * 144
            to = out[(first + s) // per_row, at : at + 144]
            encode(s, plan[0], lanes, found, codes, to)
            for k in range(4):
                for j in range(32):
                    to[16 + 32 * k + j] = codes[64 * k + j] | codes[64 * k + 32 + j] << 4


@compiled
def q5_k(rows: Floats, importance: Floats, weighted: bool, effort: int, out: Bytes) -> None:
    """As q4_k, out [n, columns / 256 * 176]: float16 scale and offset, 12 bytes of parts, 32 of fifth bits, 128 of the lower four."""
    lanes, found, new, spare = memory()
    codes, plan, per_row = np.zeros(256, np.uint8), plan_of(np.float32(31), weighted, effort), rows.shape[1] // 256
    for first in range(0, rows.shape[0] * per_row, 8):
        load(rows, first, importance, weighted, lanes)
        fit(plan, lanes, found, new, spare)
        for s in range(min(8, rows.shape[0] * per_row - first)):
            at = (first + s) % per_row * 176
            to = out[(first + s) // per_row, at : at + 176]
            encode(s, plan[0], lanes, found, codes, to)
            to[16:48] = 0
            for k in range(8):
                for j in range(32):
                    to[16 + j] |= (codes[32 * k + j] >> 4) << k
            for k in range(4):
                for j in range(32):
                    to[48 + 32 * k + j] = (codes[64 * k + j] & 15) | (codes[64 * k + 32 + j] & 15) << 4
