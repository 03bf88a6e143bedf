"""float16 by its bits, since numba has no float16 on CPUs: what scales are rounded to before weights are rounded against them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_quantize.kernels.compiled import ZERO, Scalar, inlined, number

# Below this a block is written as zeros. Source: GROUP_MAX_EPS in ggml-quants.c. Half of the least float16 is 3e-8.
EPSILON = number(1e-15)
# Scales of fewer steps of the subnormal spacing than this are coarse: rounding one moves it by more than 0.8 %, so its neighbour is tried.
COARSE = 64


@inlined
def half_bits(x: Scalar) -> Scalar:
    """The nearest float16 to a float32, ties to even, as its 16 bits; infinity when it is too large."""
    bits = np.int64(np.float32(x).view(np.uint32))
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size >= 0x47800000:
        return sign | (0x7E00 if size > 0x7F800000 else 0x7C00)
    if size < 0x38800000:  # subnormal: next to 0.5 the spacing of float32 is that of subnormal float16
        moved = np.float32(abs(np.float32(x)) + np.float32(0.5))
        return sign | (np.int64(moved.view(np.uint32)) - 0x3F000000)
    return sign | ((size + 0xFFF + ((size >> 13) & 1) - 0x38000000) >> 13)


@inlined
def half_value(bits: Scalar) -> Scalar:
    """The float32 of a finite float16 given by its bits."""
    size = bits & 0x7FFF
    value = np.float32(size) * np.float32(2.0**-24)
    if size >= 0x400:
        value = np.uint32((size << 13) + 0x38000000).view(np.float32)
    return -value if bits & 0x8000 else value


@inlined
def largest(x: NDArray[np.float32], start: Scalar, n: Scalar) -> Scalar:
    """The weight with the largest magnitude, the first of equals, with its sign."""
    high, low = x[start], x[start]
    for j in range(n):
        value = x[start + j]
        high = value if value > high else high
        low = value if value < low else low
    if high != -low:
        return high if high > -low else low
    for j in range(n):
        if abs(x[start + j]) == high:
            return x[start + j]
    return ZERO
