"""Characters that are not what they look like: controls, halves of pairs, and text that shows nothing."""

from __future__ import annotations

import re
import unicodedata

SURROGATE = re.compile("[\ud800-\udfff]")
C0 = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")
BIDI = "\u202a-\u202e\u2066-\u2069"
# Zero-width space, word joiner, byte order mark, Hangul filler, soft hyphen. Joiners are left alone: scripts and emoji need them.
ZERO_WIDTH = "\u200b\u2060\ufeff\u3164\u00ad"
TAGS = re.compile("[\U000e0000-\U000e007f]+")
INVISIBLE = re.compile(f"[{ZERO_WIDTH}{BIDI}\U000e0000-\U000e007f]")
BLACK_FLAG, TAG_END = "\U0001f3f4", "\U000e007f"  # a flag of a region: the black flag, tags that spell its code, the end tag
ODD = re.compile(f"[\ud800-\udfff\x00-\x08\x0b-\x1f{ZERO_WIDTH}{BIDI}\U000e0000-\U000e007f]")
# Letters by category, and yet nothing is drawn for them: Hangul fillers and the Braille blank.
BLANK_LETTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")


def is_blank(text: str) -> bool:
    """Whether nothing of `text` would be seen: empty, whitespace, controls, zero-width and tag characters."""
    return all(ch.isspace() or ch in BLANK_LETTERS or unicodedata.category(ch) in ("Cc", "Cf", "Zl", "Zp", "Zs") for ch in text)


def hidden_tags(text: str) -> re.Match[str] | None:
    """The first run of tag characters that is no flag: text that a model reads and a person does not see."""
    for match in TAGS.finditer(text):
        if not (match.start() and text[match.start() - 1] == BLACK_FLAG and match[0].endswith(TAG_END) and len(match[0]) <= 7):
            return match
    return None


def first_invisible(text: str, only: str = ZERO_WIDTH + BIDI) -> re.Match[str] | None:
    return re.search(f"[{only}]", text)


def folded(text: str) -> str:
    """`text` as it looks: without invisible characters, compatibility forms replaced (NFKC)."""
    return unicodedata.normalize("NFKC", INVISIBLE.sub("", text))
