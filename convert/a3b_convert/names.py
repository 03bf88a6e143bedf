"""A model's name taken apart: "Qwen/Qwen3-30B-A3B-Instruct-2507" is an organization, a base name, sizes, a finetune and a version.

Source: get_model_id_components in gguf-py/gguf/metadata.py of llama.cpp, whose answers a test compares with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.I)
QUANT = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.I)
SIZE = re.compile(r"(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl)", re.I)
TUNE = re.compile(r"chat|instruct|vision|lora", re.I)


@dataclass(frozen=True, slots=True)
class Name:
    """The parts of a model's name, like "Qwen/Qwen3-30B-A3B-Instruct-2507"; empty where there is none."""

    full: str
    organization: str = ""
    basename: str = ""
    finetune: str = ""
    version: str = ""
    size_label: str = ""

    @property
    def title(self) -> str:
        return title(self.full)


def title(text: str) -> str:
    """Words with a capital each, unless they are an acronym, a version or begin with a digit."""
    words = text.strip().replace("-", " ").split()
    return " ".join(word.title() if word.islower() and not re.match(r"^(v\d+(?:\.\d+)*|\d.*)$", word) else word for word in words)


def parse_name(model_id: str, n_params: int = 0) -> Name:
    """Splits a repository id or folder name at its hyphens. n_params: tells a size (30B) from a context length (128k)."""
    if " " in model_id:
        return Name(model_id)
    organization, _, full = model_id.partition("/") if "/" in model_id else ("", "", model_id)
    organization = "" if organization.startswith(".") else organization
    parts = [_kind(part, i == 0, n_params) for i, part in enumerate(filter(None, full.split("-")))]
    if any(kind == "size" and not part.isalpha() for part, kind in parts):  # a number makes size words like "mini" part of the name
        parts = [(part, "" if kind == "size" and part.isalpha() else kind) for part, kind in parts]
    n_base = 0
    while n_base < len(parts) and (parts[n_base][1] == "version" or (not parts[n_base][1] and parts[n_base][0][0].isalpha())):
        n_base += 1
    if n_base == len(parts):
        while n_base and parts[n_base - 1][1] == "version":
            n_base -= 1
    basename, rest = "-".join(part for part, _ in parts[:n_base]), parts[n_base:]
    finetune = "-".join(part for part, kind in rest if kind in ("", "finetune"))
    version = "-".join(part for part, kind in rest if kind == "version")
    size = "-".join(dict.fromkeys(part for part, kind in rest if kind == "size"))
    return Name(full, organization, basename if finetune or version or size else "", finetune, version, size)


def _kind(part: str, first: bool, n_params: int) -> tuple[str, str]:
    """A part of a name, its letters in the usual case, and what it is: version, type, size, finetune or ""."""
    if VERSION.fullmatch(part):
        return part, "version"
    if QUANT.fullmatch(part):
        return part.upper(), "type"
    if not first and SIZE.fullmatch(part):
        part = part.replace("_", ".")
        if part[-1].isdecimal():  # 7b1 is 7.1b
            part = f"{part[:-2]}.{part[-1]}{part[-2]}"
        if len(part) > 1 and part[-2].isdecimal() and part[-1] in "kmbt":
            part = part[:-1] + part[-1].upper()
        if n_params and _far_from(part, n_params):
            return part[:-1] + part[-1].lower(), "finetune"
        return part, "size"
    return part, "finetune" if not first and TUNE.fullmatch(part) else ""


def _far_from(label: str, n_params: int) -> bool:
    """Whether a label like 128K is no size of a model of `n_params`, but a context length."""
    try:
        size = float(label[:-1]) * 1000 ** " KMBT".find(label[-1])
    except ValueError:  # A3B: active parameters
        return False
    return bool(abs(size - n_params) > 7 * n_params // 8)
