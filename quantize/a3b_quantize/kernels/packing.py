"""Codes and parts of a super-block into the bytes of its type."""

from __future__ import annotations

import numpy as np

from a3b_quantize.kernels.compiled import Bytes, Floats, inlined


@inlined
def pack_q6(codes: Bytes, to: Bytes) -> None:
    """256 codes of 6 bits into 192 bytes: 128 of low halves, 64 of the high 2 bits. Source: quantize_row_q6_K_ref."""
    for half in range(2):
        for j in range(32):
            a, b = codes[half * 128 + j], codes[half * 128 + j + 32]
            c, d = codes[half * 128 + j + 64], codes[half * 128 + j + 96]
            to[half * 64 + j] = (a & 15) | (c & 15) << 4
            to[half * 64 + j + 32] = (b & 15) | (d & 15) << 4
            to[128 + half * 32 + j] = a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6


@inlined
def pack_q3(codes: Bytes, parts: Floats, to: Bytes) -> None:
    """256 codes of 3 bits into 96 bytes: 32 of third bits, 64 of the others; then 12 of 16 parts. Source: quantize_row_q3_K_ref."""
    to[0:32] = 0
    for k in range(8):
        for j in range(32):
            to[j] |= (codes[32 * k + j] >> 2) << k
    for half in range(2):
        for j in range(32):
            a, b = codes[half * 128 + j] & 3, codes[half * 128 + j + 32] & 3
            c, d = codes[half * 128 + j + 64] & 3, codes[half * 128 + j + 96] & 3
            to[32 + half * 32 + j] = a | b << 2 | c << 4 | d << 6
    to[96:108] = 0
    for b in range(16):
        part = np.int64(parts[b]) + 32
        to[96 + b % 8] |= (part & 15) << 4 * (b // 8)
        to[104 + b % 4] |= (part >> 4) << 2 * (b // 4)


@inlined
def pack_xs(codes: Bytes, parts: Floats, to: Bytes) -> None:
    """256 codes, 8 parts: 2 bytes of the parts' high 2 bits, 4 of the low 4, 128 of codes. Source: quantize_row_iq4_nl_impl."""
    to[2:8] = 0
    for b in range(8):
        part = np.int64(parts[b]) + 32
        to[2 + b // 4] |= (part >> 4) << 2 * (b % 4)
        to[4 + b // 2] |= (part & 15) << 4 * (b % 2)
        for j in range(16):
            to[8 + b * 16 + j] = codes[32 * b + j] | codes[32 * b + 16 + j] << 4
