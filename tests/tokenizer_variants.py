"""Ways in which people's tokenizer files differ, as edits of the embedded model's: name -> edit(files by name, as JSON)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Files = dict[str, dict[str, Any]]
NAMES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def merges_as_texts(files: Files) -> None:
    model = files["tokenizer.json"]["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]


def byte_level_post_processor(files: Files) -> None:
    files["tokenizer.json"]["post_processor"] = BYTE_LEVEL
    files["tokenizer_config.json"]["add_bos_token"] = False


def added_tokens_everywhere(files: Files) -> None:
    added = files["tokenizer.json"]["added_tokens"]
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    files["tokenizer_config.json"]["added_tokens_decoder"] = {str(entry["id"]): {key: entry[key] for key in keys} for entry in added}


def ids_in_text_config(files: Files) -> None:
    config = files["config.json"]
    config["text_config"] = {key: config.pop(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files["tokenizer_config.json"].pop("pad_token")


VARIANTS: dict[str, Callable[[Files], None]] = {
    "as it is": lambda files: None,
    "extra special tokens as a list": lambda files: files["tokenizer_config.json"].update(extra_special_tokens=["<think>", "</think>"]),
    "extra special tokens as an object": lambda files: files["tokenizer_config.json"].update(
        extra_special_tokens={"think_token": "<think>"}
    ),
    "a new extra special token": lambda files: (
        files["tokenizer_config.json"].update(extra_special_tokens=["<|new|>"]),
        files["config.json"].update(vocab_size=4100),
    )[0],
    "extra special tokens under their old name": lambda files: files["tokenizer_config.json"].update(
        additional_special_tokens=["<think>", "<|im_start|>"]
    ),
    "a new one under the old name": lambda files: (
        files["tokenizer_config.json"].update(additional_special_tokens=["<new>"]),
        files["config.json"].update(vocab_size=4100),
    )[0],
    "fewer tokens than the embedding": lambda files: files["config.json"].update(vocab_size=4104),
    "merges as texts": merges_as_texts,
    "byte-level post-processor": byte_level_post_processor,
    "no BOS by configuration": lambda files: files["tokenizer_config.json"].update(add_bos_token=False),
    "added tokens in both files": added_tokens_everywhere,
    "ids in text_config": ids_in_text_config,
    "a name that is no added token": lambda files: files["tokenizer_config.json"].update(bos_token="!"),
}


def write_variant(source: Path, folder: Path, name: str) -> Path:
    """The tokenizer files of `source`, edited, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {file: json.loads((source / file).read_text(encoding="utf-8")) for file in NAMES}
    VARIANTS[name](files)
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value), encoding="utf-8")
    shutil.copy(source / "chat_template.jinja", folder)
    return folder
