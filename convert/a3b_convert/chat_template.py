"""Which chat template a model gets, where the checkpoint has several, and where it was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3b_convert.config import read_json, read_text
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.metadata import Metadata, array, string


@dataclass(frozen=True, slots=True)
class Found:
    """Templates of one place, by name; "default" is the one that is used when none is asked for."""

    place: str
    templates: dict[str, str]


def template_metadata(folder: Path, chosen: Path | None) -> tuple[Metadata, list[str]]:
    """tokenizer.chat_template, and a note that says which was used.

    Precedence, as in llama.cpp: `chosen`, tokenizer_config.json, chat_template.jinja, chat_template.json. A place that was passed
    over and holds something else is named in the note.
    """
    if chosen is not None:
        found = [_of_file(chosen)]
    else:
        places = (_of_json(folder / "tokenizer_config.json"), _of_jinja(folder), _of_json(folder / "chat_template.json"))
        found = [place for place in places if place is not None]
    if not found:
        return {}, ["no chat template was found: chats cannot be served; give one with --chat-template FILE"]
    first, *others = found
    note = f"chat template: {first.place}"
    different = [other.place for other in others if other.templates != first.templates]
    if different:
        note += f"; {' and '.join(different)} differs and was not used (--chat-template FILE chooses it)"
    named = {name: text for name, text in first.templates.items() if name != "default"}
    out: Metadata = {f"tokenizer.chat_template.{name}": string(text) for name, text in named.items()}
    if named:
        out["tokenizer.chat_templates"] = array("str", list(named))
    if "default" in first.templates:
        out["tokenizer.chat_template"] = string(first.templates["default"])
    return out, [note]


def _of_file(path: Path) -> Found:
    if not path.is_file():
        raise UsageError(f"--chat-template: {path} is not a file", "give a Jinja template")
    return Found(str(path), {"default": _text(path)})


def _of_jinja(folder: Path) -> Found | None:
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return None
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return Found(path.name, {"default": _text(path)} | {_name(other.stem): _text(other) for other in more})


def _of_json(path: Path) -> Found | None:
    """The key chat_template of a JSON file: one template, or a list of them with names."""
    value: Any = read_json(path).get("chat_template") if path.is_file() else None
    if value is None:
        return None
    if isinstance(value, str):
        return Found(path.name, {"default": value})
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    if not entries or not all(isinstance(entry.get(key), str) for entry in entries for key in ("name", "template")):
        raise BadInput(f"{path}: key chat_template is no text and no list of named texts", "give one with --chat-template FILE")
    return Found(path.name, {_name(entry["name"]): entry["template"] for entry in entries})


def _text(path: Path) -> str:
    return read_text(path).replace("\r\n", "\n")


def _name(text: str) -> str:
    """A template's name as a metadata key holds it: letters, digits and underscores."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in text)
