"""Recognises a tokenizer's pre-tokenizer by its regex and normalizer, as they stand in tokenizer.json.

llama.cpp knows pre-tokenizers by name and has each regex built in; its converter finds the name by hashing the tokens of a sample,
which fails for any tokenizer that it has not seen. The regex itself says it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput

# tokenizer.ggml.pre -> the regex that llama.cpp uses under this name. Source: llm_tokenizer_bpe in src/llama-vocab.cpp
PRE_TOKENIZERS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
OTHER_TEXT = "llama.cpp would cut text otherwise than the model was trained on, so it is not converted"
NORMALIZERS: tuple[object, ...] = (None, {"type": "NFC"})  # llama.cpp normalizes nothing; Qwen's own tokenizers ask for NFC


def recognise(path: Path, tokenizer: dict[str, Any]) -> str:
    """The value of tokenizer.ggml.pre. Raises BadInput that shows the regex when llama.cpp would cut text differently."""
    regex = _only_regex(path, tokenizer.get("pre_tokenizer"))
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == regex), None)
    if name is None:
        raise BadInput(
            f"{path}: the pre-tokenizer's regex is not known: {regex}",
            f"known: {', '.join(f'{name} {known}' for name, known in PRE_TOKENIZERS.items())}",
        )
    normalizer = tokenizer.get("normalizer")
    if normalizer not in NORMALIZERS:
        raise BadInput(f"{path}: the normalizer is {normalizer}, expected none or NFC", OTHER_TEXT)
    return name


def _only_regex(path: Path, pre_tokenizer: Any) -> str:
    """The regex of Split + ByteLevel, the only form that this family has."""
    steps = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("type") == "Sequence" else None
    if isinstance(steps, list) and len(steps) == 2 and all(isinstance(step, dict) for step in steps):
        split, byte_level = steps
        pattern = split.get("pattern")
        wanted = {"type": "Split", "behavior": "Isolated", "invert": False}
        is_split = all(split.get(key) == value for key, value in wanted.items()) and isinstance(pattern, dict)
        is_bytes = byte_level.get("type") == "ByteLevel" and not byte_level.get("add_prefix_space") and byte_level.get("use_regex") is False
        if is_split and is_bytes and isinstance(pattern.get("Regex"), str):
            return str(pattern["Regex"])
    raise BadInput(f"{path}: the pre-tokenizer is {pre_tokenizer}, expected one Split by a regex, then ByteLevel", OTHER_TEXT)
