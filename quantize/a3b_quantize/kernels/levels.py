"""Levels around zero: evenly spaced ones of Q6_K, Q3_K, Q4_0 and the 16 uneven ones of IQ4_NL and IQ4_XS; and the search for a scale.

Weights lie in lanes: y [weights of a block, blocks], one block a vector lane, each block divided by something near its largest weight.
"""

from __future__ import annotations

import numpy as np

from a3b_quantize.kernels.compiled import ONE, ZERO, Floats, Scalar, inlined, number
from a3b_quantize.kernels.linear import clamped

# curved: the uneven levels, else -low..low-1; low and high: what the largest weight is put on, from below and from above
Levels = tuple[bool, Scalar, Scalar]
# What is tried: how many inverse scales that put the largest weight on the lowest level, and on the highest; the least and largest of them
# as shares of that; how often the codes are made anew with the best scale
Tries = tuple[Scalar, Scalar, Scalar, Scalar, Scalar]

# Source: kvalues_iq4nl in ggml-common.h
UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Borders between levels are multiples of a half, so the nearest level is looked up by twice the value, from -128 to 127.5. A look-up is
# twice as fast as 15 compares and adds, and those five times as fast as ggml's binary search.
_HALVES = np.arange(-256, 256) / 2 + 0.25
CODES = np.abs(_HALVES[:, None] - UNEVEN).argmin(axis=1).astype(np.int32)
NEAREST = UNEVEN[CODES]
TWO, MIDDLE, LAST = number(2), number(256), number(511)


@inlined
def place(x: Scalar) -> Scalar:
    """Where to look up x. Not a number is taken for the least."""
    at = TWO * x + MIDDLE
    at = at if at > ZERO else ZERO
    return np.int32(at if at < LAST else LAST)


@inlined
def level(levels: Levels, x: Scalar) -> Scalar:
    """Value of the level nearest to x."""
    curved, low, _ = levels
    return NEAREST[place(x)] if curved else clamped(x, -low, low - ONE)


@inlined
def code(levels: Levels, x: Scalar) -> Scalar:
    """Number of the level nearest to x, from 0."""
    curved, low, _ = levels
    return CODES[place(x)] if curved else np.int32(clamped(x, -low, low - ONE) + low)


@inlined
def sums(levels: Levels, y: Floats, w: Floats, inverses: Floats, sx: Floats, sq: Floats) -> None:
    """Fills sums over each block, with levels q of inverse * y: of w q y and w q q."""
    for b in range(y.shape[1]):
        sx[b], sq[b] = ZERO, ZERO
    for part in range(0, y.shape[0], 8):
        for b in range(y.shape[1]):
            x_sum, q_sum = ZERO, ZERO
            for j in range(8):
                q = level(levels, inverses[b] * y[part + j, b])
                wq = w[part + j, b] * q
                x_sum += wq * y[part + j, b]
                q_sum += wq * q
            sx[b] += x_sum
            sq[b] += q_sum


@inlined
def errors(levels: Levels, y: Floats, w: Floats, scales: Floats, inverses: Floats, out: Floats) -> None:
    """Fills out with the weighted squared error of each block under its scale; inverses: of the scales, 0 for 0."""
    for b in range(y.shape[1]):
        out[b] = ZERO
    for part in range(0, y.shape[0], 8):
        for b in range(y.shape[1]):
            total = ZERO
            for j in range(8):
                off = y[part + j, b] - scales[b] * level(levels, inverses[b] * y[part + j, b])
                total += w[part + j, b] * off * off
            out[b] += total


@inlined
def squares(y: Floats, w: Floats, out: Floats) -> None:
    """Fills out with the weighted squares of each block: its error when it is written as zeros."""
    for b in range(y.shape[1]):
        out[b] = ZERO
    for j in range(y.shape[0]):
        for b in range(y.shape[1]):
            out[b] += w[j, b] * y[j, b] * y[j, b]


@inlined
def size(levels: Levels, tries: Tries, t: Scalar) -> Scalar:
    """What the largest weight is multiplied to in try t."""
    _, low, high = levels
    down, up, least, most, _ = tries
    n, at, end = (down, t, -low) if t < down else (up, t - down, high)
    return end * (most - (most - least) * np.float32(at) / np.float32(max(n - 1, 1)))
