"""Templates that were read by a person: they are rendered in process. Everything else is code of unknown origin.

A row is the sha256 of a template's text and what it is. The texts of the first rows ship with a3b (published/README.md).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

PUBLISHED = Path(__file__).parent / "published"
KNOWN: dict[str, str] = {
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259": "qwen3.6",
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": "qwen3.5",
    "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5": "qwen3",
    "d287fb2edf144207f868ae1b282755dc19db2a3f1c5b3a3d57e9e5abffa98392": "qwen3-coder",
    "e6404c67be72f652ad02534a097d9913cc1bab5455e57b1d1f64e73c873b961d": "chatml",
    "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90": "phi-3.5",
    "e437f38dbae73e73028a1a7e8de7bef042710a183d397803d08cddd9c36d9b1e": "tiny-a3b",
    "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f": "Qwen2.5-7B-Instruct",
    "5ed15374ce53e19a7798710736a2c9fe41c79f7385e8421a2080d6575a80ef1b": "QwQ-32B",
}


def template_sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def known_name(text: str) -> str | None:
    """What template `text` is, if it is a known one to the last byte."""
    return KNOWN.get(template_sha256(text))


def published_text(name: str) -> str:
    """The template that ships under `name`. Raises FileNotFoundError for a name that has none."""
    return (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")


def published_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PUBLISHED.glob("*.jinja")))
