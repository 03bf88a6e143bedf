"""Bytes and token counts: parsed from what people type, printed the way they read."""

from __future__ import annotations

import re

from a3b_gguf.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
}  # fmt: skip
NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, option: str = "size") -> int:
    """Bytes of "16GiB", "16GB", "512MiB" or a plain number of bytes. GiB is 2^30, GB and G are 10^9.

    Raises UsageError naming `option` for anything else.
    """
    match = NUMBER.fullmatch(text)
    if not match or match[2].lower() not in FACTORS:
        raise UsageError(f"{option}: {text!r} is not a size", "write it like 16GiB, 16GB or 512MiB")
    return int(float(match[1]) * FACTORS[match[2].lower()])


def parse_tokens(text: str, option: str = "--ctx") -> int:
    """Tokens of "64000", "64k" (64,000) or "64Ki" (65,536). Raises UsageError naming `option`."""
    match = NUMBER.fullmatch(text)
    factors = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": 1 << 20}
    if not match or match[2].lower() not in factors or "." in match[1]:
        raise UsageError(f"{option}: {text!r} is not a number of tokens", "write it like 64000, 64k or 64Ki")
    tokens = int(match[1]) * factors[match[2].lower()]
    if tokens < 1:
        raise UsageError(f"{option}: {text!r} is not a number of tokens", "it must be at least 1")
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
