"""Delimiters of turns by model family: what is a control token to one model is a row of letters to another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from a3b_gguf.prompt.profiles import Profile

FAMILIES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ChatML", re.compile(r"<\|im_(?:start|end)\|>")),
    ("Phi-3", re.compile(r"<\|(?:system|user|assistant|end)\|>")),
    ("Llama 2", re.compile(r"\[/?INST\]|<</?SYS>>")),
    ("Llama 3", re.compile(r"<\|(?:start_header_id|end_header_id|eot_id|begin_of_text)\|>")),
    ("Gemma", re.compile(r"<(?:start|end)_of_turn>")),
    ("DeepSeek", re.compile(r"<｜(?:User|Assistant)｜>")),
)


def foreign_families(profile: Profile) -> Iterator[tuple[str, re.Pattern[str]]]:
    """The families that the model is not of."""
    for family, pattern in FAMILIES:
        own = (family == "ChatML" and profile.is_chatml) or (family == "Phi-3" and profile.is_pipes)
        if not own:
            yield family, pattern


def foreign_delimiter(text: str, profile: Profile) -> tuple[str, re.Match[str]] | None:
    """The first delimiter of another family: its name, and where."""
    if "<" not in text and "[" not in text:
        return None
    for family, pattern in foreign_families(profile):
        found = pattern.search(text)
        if found:
            return family, found
    return None
