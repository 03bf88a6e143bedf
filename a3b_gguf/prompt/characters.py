"""Characters that are not what they look like: controls, halves of pairs, and text that shows nothing."""

from __future__ import annotations

import re
import unicodedata

SURROGATE = re.compile("[\ud800-\udfff]")
C0 = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
ODD = re.compile(f"{SURROGATE.pattern}|{C0.pattern}")
# Letters by category, and yet nothing is drawn for them: Hangul fillers and the Braille blank.
BLANK_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")


def is_blank(text: str) -> bool:
    """Whether nothing of `text` would be seen: empty, whitespace, controls, zero-width and tag characters."""
    return all(ch.isspace() or ch in BLANK_LETTERS or unicodedata.category(ch) in ("Cc", "Cf", "Zl", "Zp", "Zs") for ch in text)
