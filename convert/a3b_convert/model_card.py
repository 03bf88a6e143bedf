"""The front matter of a model card (README.md): licence, ancestors, tags and languages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from a3b_convert.names import parse_name, title
from a3b_gguf.metadata import Metadata, array, string, u32

HUB = "https://huggingface.co/"
FRONT_MATTER = re.compile(r"---\n(.*?)^---$", re.S | re.M)


def read_card(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The front matter as an object, empty when there is none, and a note when it cannot be read: a card is no reason to stop."""
    if not path.is_file():
        return {}, []
    match = FRONT_MATTER.match(path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n"))
    if not match:
        return {}, []
    import yaml

    try:
        card = yaml.safe_load(re.sub(r"^- no$", '- "no"', match[1], flags=re.M).replace("\t", "  "))  # YAML takes Norwegian for false
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, [f"the front matter of {path.name} is not YAML and was left out ({next(iter(str(error).splitlines()), '')})"]
    return (card, []) if isinstance(card, dict) else ({}, [])


def card_metadata(card: Mapping[str, Any], n_params: int) -> Metadata:
    """general.license, base_model, tags and languages in llama.cpp's order. Values of another shape than a card's are left out."""
    out: Metadata = {}
    for theirs, ours in (("license", "license"), ("license_name", "license.name"), ("license_link", "license.link")):
        if found := texts(card.get(theirs)):
            out[f"general.{ours}"] = string(",".join(found))
    models = texts(card.get("base_model"))
    if models:
        out["general.base_model.count"] = u32(len(models))
    for number, model in enumerate(models):
        out |= {f"general.base_model.{number}.{key}": string(value) for key, value in _base_model(model, n_params).items() if value}
    for key, sources in (("tags", ("tags", "pipeline_tag")), ("languages", ("languages", "language"))):
        if found := [text for source in sources for text in texts(card.get(source))]:
            out[f"general.{key}"] = array("str", found)
    return out


def texts(value: Any) -> list[str]:
    """A text or the texts of a list."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _base_model(model: str, n_params: int) -> dict[str, str]:
    """Name, version, organization and address of a model that is given by its id or its address."""
    address = model if model.startswith(("http://", "https://", "ssh://")) else ""
    model_id = address.removeprefix(HUB) if address.startswith(HUB) else model
    if address == model_id:
        return {"repo_url": address}
    name = parse_name(model_id, n_params)
    address = address or (HUB + model_id if name.organization else "")
    return {"name": name.title, "version": name.version, "organization": title(name.organization), "repo_url": address}
