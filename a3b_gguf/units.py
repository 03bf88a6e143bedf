"""Bytes and token counts: parsed from what people type, printed the way they read."""

from __future__ import annotations

import re
from fractions import Fraction

from a3b_gguf.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
}  # fmt: skip
NUMBER = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*")
MOST = (1 << 63) - 1  # what a file system and llama.cpp count with


def parse_bytes(text: str, option: str = "size") -> int:
    """Bytes of "16GiB", "16GB", "512MiB" or a plain number of bytes. GiB is 2^30, GB and G are 10^9.

    Raises UsageError naming `option` for anything else, also for more than 2^63 - 1.
    """
    match = NUMBER.fullmatch(text)
    if not match or match[2].lower() not in FACTORS:
        raise UsageError(f"{option}: {text!r} is not a size", "write it like 16GiB, 16GB or 512MiB")
    n_bytes = int(Fraction(match[1]) * FACTORS[match[2].lower()])
    if n_bytes > MOST:
        raise UsageError(f"{option}: {text!r} is more than any file can hold", f"it must be at most {MOST:,} bytes")
    return n_bytes


def parse_tokens(text: str, option: str = "--ctx") -> int:
    """Tokens of "64000", "64k" (64,000) or "64Ki" (65,536). Raises UsageError naming `option`."""
    match = NUMBER.fullmatch(text)
    factors = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": 1 << 20}
    if not match or match[2].lower() not in factors or "." in match[1]:
        raise UsageError(f"{option}: {text!r} is not a number of tokens", "write it like 64000, 64k or 64Ki")
    tokens = int(match[1]) * factors[match[2].lower()]
    if not 1 <= tokens < 1 << 31:
        raise UsageError(f"{option}: {text!r} is not a number of tokens", "it must be 1 to 2,147,483,647")
    return tokens


def mib(n_bytes: float) -> str:
    """Binary megabytes with a thousands separator: "1,250.00 MiB"."""
    return f"{n_bytes / MIB:,.2f} MiB"


def human_bytes(n_bytes: float) -> str:
    """The largest binary unit that keeps the number above one: "17.43 GiB"."""
    value, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
