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
E4M3_NAN = 0x7F  # without its sign
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


def _e4m3() -> NDArray[np.float32]:
    """Value of each of the 256 codes of F8_E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; exact in float32.

    No infinities; 0x7F and 0xFF are NaN. Source: OCP 8-bit floating point specification, E4M3.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[code & E4M3_NAN == E4M3_NAN] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


E4M3 = _e4m3()
E4M3.flags.writeable = False
