"""config.json as the converter needs it: a key is needed, optional or expected to have a value that is implemented."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from a3b_gguf.errors import BadInput

Kind = TypeVar("Kind", int, float, str, bool, list[Any], dict[str, Any])
F32_MAX = 3.4e38
RENAMED = {"num_local_experts": "num_experts"}  # as transformers 5 saves a Qwen3MoeConfig -> as it was published
ORIGINAL = "take config.json from the original model"
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def read_text(path: Path) -> str:
    """A file's text. Raises BadInput when it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "download the file again") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 at byte {error.start:,}", "download the file again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BadInput with the line when it is missing, broken or no object."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}: line {error.lineno}: {error.msg}", "download the file again") from error
    except (RecursionError, ValueError) as error:  # the latter for a number of more digits than Python reads
        raise BadInput(f"{path} is nested too deeply, or holds an endless number", "download the file again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds {type(value).__name__}, expected an object", "download the file again")
    return value


@dataclass(frozen=True, slots=True)
class Config:
    """Keys of config.json, those of `text_config` laid over the root's. root: the file as it is. at: where a section lies."""

    path: Path
    values: Mapping[str, Any]
    root: Mapping[str, Any]
    at: str = ""

    @property
    def architecture(self) -> str:
        """The class name that selects the architecture: the text model's own when it is named, else the root's."""
        inner = self.root.get("text_config")
        for section in (inner if isinstance(inner, dict) else {}, self.root):
            names = section.get("architectures")
            if isinstance(names, list) and names and isinstance(names[0], str):
                return names[0]
        raise BadInput(f"{self.path}: key architectures is missing", "it must name the model's class")

    def need(self, key: str, kind: type[Kind]) -> Kind:
        """The value of `key`. Raises BadInput when it is missing, null or not of type `kind`."""
        value = self.may(key, kind)
        if value is None:
            raise BadInput(f"{self.path}: key {self.at}{key} is missing, expected {WORDS[kind]}", ORIGINAL)
        return value

    def may(self, key: str, kind: type[Kind], default: Kind | None = None) -> Kind | None:
        """The value of `key`, or `default` when it is missing or null. Raises BadInput when it is not of type `kind`."""
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < F32_MAX else math.inf
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(f"key {self.at}{key} is {value!r}, expected {WORDS[kind]}")
        if isinstance(value, (int, float)) and not abs(value) < F32_MAX:
            raise self.wrong(f"key {self.at}{key} is {value!r}, which no file can hold")
        return value

    def count(self, key: str, most: int = (1 << 32) - 1) -> int:
        """The value of `key`, from 1 to `most`, which is what GGUF's u32 holds unless llama.cpp has a limit of its own."""
        value = self.need(key, int)
        if not 1 <= value <= most:
            raise BadInput(f"{self.path}: key {self.at}{key} is {value}, expected 1 to {most}", ORIGINAL)
        return value

    def wrong(self, what: str) -> BadInput:
        """The error for keys that contradict each other or hold what cannot be."""
        return BadInput(f"{self.path}: {what}", ORIGINAL)

    def expect(self, key: str, *supported: Any) -> None:
        """Stops the conversion when `key` is present with a value that is not implemented."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            known = " or ".join(map(json.dumps, supported))
            raise BadInput(
                f"{self.path}: key {self.at}{key} is {json.dumps(value)}, supported: {known}",
                "this variant of the architecture is not implemented, and converting it as another would give a wrong model",
            )

    def section(self, key: str) -> Config:
        """The object under `key` as a Config of its own, empty when it is missing."""
        return Config(self.path, self.may(key, dict) or {}, self.root, f"{self.at}{key}.")


def read_config(folder: Path) -> Config:
    """config.json of a checkpoint folder. Raises BadInput when there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} has no config.json", "give a checkpoint folder as it was published, with config.json and safetensors")
    root = read_json(path)
    inner = root.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise BadInput(f"{path}: key text_config is {inner!r}, expected an object", ORIGINAL)
    values = {**root, **(inner or {})}
    for theirs, ours in RENAMED.items():
        if values.get(ours) is None and theirs in values:
            values[ours] = values[theirs]
    return Config(path, values, root)
