"""Bit patterns of bf16, f16 and f32: which values are not finite, and how float32 becomes bf16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.tensors import GGMLType

# type -> (signed and unsigned integer of the same width, bit pattern of +infinity, of -infinity)
PATTERNS = {
    "bf16": (np.int16, np.uint16, 0x7F80, 0xFF80),
    "f16": (np.int16, np.uint16, 0x7C00, 0xFC00),
    "f32": (np.int32, np.uint32, 0x7F800000, 0xFF800000),
}
F16_MAX = 65504.0
F16_OVERFLOW = 65520.0  # the smallest float32 that rounds to infinity in f16


def first_nonfinite(data: bytes | memoryview, kind: GGMLType) -> int | None:
    """Index of the first NaN or infinity in stored values, or None.

    Two maxima and no temporary array: of the bits as signed integers (catches +Inf and NaN without sign) and as unsigned
    ones (-Inf and NaN with it), since a float's magnitude grows with its bits. It runs at the speed of memory.
    """
    signed, unsigned, positive, negative = PATTERNS[kind.name]
    bits = np.frombuffer(data, unsigned)
    if not bits.size or (int(bits.view(signed).max()) < positive and int(bits.max()) < negative):
        return None
    magnitude = bits & unsigned(positive | (positive - 1))
    return int(np.argmax(magnitude >= positive))


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits, rounded to nearest even; the values must be finite. Source: ggml_compute_fp32_to_bf16 in ggml-impl.h"""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    return rounded.astype(np.uint16)
