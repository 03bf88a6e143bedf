"""`--set-kv KEY=VALUE`: changes metadata, with the type that the key has, and refuses what the tensors contradict.

general.name=My model                    a key that is there keeps its type; the value is checked against it
qwen35moe.expert_weights_scale=f32:2.5   a new key: with its type (u32, i32, f32, bool, str, ...), or the nearest one to the value
tokenizer.chat_template=@template.jinja  a text from a file
general.tags=["chat", "moe"]             an array as JSON
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.metadata import KINDS, Field, Metadata, SkippedArray
from a3b_gguf.tensors import Model
from a3b_quantize.describing import TOKENS, contradiction

OPTION = "--set-kv"
BOOLS = {"true": True, "false": False}
INTEGERS = {"u8": (0, 8), "i8": (1, 7), "u16": (0, 16), "i16": (1, 15), "u32": (0, 32), "i32": (1, 31), "u64": (0, 64), "i64": (1, 63)}
FLOATS = ("f32", "f64")
# The types of llama-quantize's --override-kv: what each fits, and first what a new key gets.
LOOSE = {"int": ("u32", *INTEGERS), "float": FLOATS, "string": ("str",)}
LARGEST_F32 = 3.4028234663852886e38
# What llama.cpp reads some keys as, whatever the value looks like; another type and it does not load the file.
KNOWN = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"\w+\.rope\.(freq_base\w*|scale_linear|scaling\.(factor|attn_factor|yarn_(log_multiplier|\w+_factor|beta_\w+)))", "f32"),
        (r"\w+\.(expert_weights_scale|\w*logit_scale|residual_scale|embedding_scale|\w*softcapping|attention\.(scale|\w+epsilon))", "f32"),
        (r"\w+\.(expert_weights_norm|rope\.scaling\.finetuned|attention\.causal)", "bool"),
        (r"tokenizer\.ggml\.(add|remove)_\w+", "bool"),
        (r"tokenizer\.ggml\.\w+_token_id", "u32"),
        (r"general\.sampling\.(top_k|penalty_last_n|mirostat)", "i32"),
        (r"general\.sampling\.(?!sequence)\w+", "f32"),
        (
            r"general\.(name|author|version|description|license|url|basename|finetune|size_label|organization)|tokenizer\.chat_template",
            "str",
        ),
    )
)
TOO_CLOSE = 0.9  # a new key as similar to one that is there is a slip of the finger


@dataclass(frozen=True, slots=True)
class Setting:
    """One `KEY=VALUE`. kind: the type that the user wrote before the value, or ""."""

    key: str
    kind: str
    text: str

    @property
    def where(self) -> str:
        return f"{OPTION} {self.key}"


def set_values(model: Model, texts: Sequence[str]) -> Model:
    """`model` with these values. Raises UsageError for a value that is not of the key's type or that the tensors contradict."""
    metadata, notes, seen = dict(model.metadata), list(model.notes), set[str]()
    for text in texts:
        setting = parse_setting(text)
        if setting.key in seen:
            raise UsageError(f"{setting.where} is given twice", "name each key once")
        seen.add(setting.key)
        new, note = _field(setting, metadata)
        why = contradiction(model, setting.key, new.value)
        if why:
            raise UsageError(f"{setting.where}: {why}", "leave it out")
        metadata[setting.key] = new
        notes += [note] if note else []
    return replace(model, metadata=metadata, notes=tuple(notes))


def parse_setting(text: str) -> Setting:
    """Raises UsageError for text that is not KEY=VALUE or KEY=TYPE:VALUE."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or any(character.isspace() for character in key):
        raise UsageError(f"{OPTION} {text!r}: expected KEY=VALUE", "write it like general.name='My model'")
    kind, colon, rest = value.partition(":")
    if colon and (kind in LOOSE or (kind in KINDS and kind != "arr")):
        return Setting(key, kind, _content(rest, key))
    return Setting(key, "", _content(value, key))


def _content(value: str, key: str) -> str:
    """The value, or what stands in the file that `@FILE` names."""
    if not value.startswith("@"):
        return value
    path = Path(value[1:])
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{OPTION} {key}: {path}: {error.strerror}", "check the path; a value after @ is read from a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{OPTION} {key}: {path} is not UTF-8 text", "give a text file") from error


def _field(setting: Setting, metadata: Metadata) -> tuple[Field, str]:
    """The new value with its type, and what the user should know about it."""
    old = metadata.get(setting.key)
    if old is None:
        return _new_field(setting, metadata)
    if setting.kind and setting.kind != old.kind and old.kind not in LOOSE.get(setting.kind, ()):
        raise UsageError(f"{setting.where}: the key is {_called(old)}, not {setting.kind}", "leave the type out, the key keeps its own")
    if old.kind != "arr":
        return Field(old.kind, _scalar(setting, old.kind, setting.text)), ""
    if setting.key in TOKENS or isinstance(old.value, SkippedArray):
        raise UsageError(f"{setting.where}: the vocabulary belongs to the rows of the embeddings", "convert again with another tokenizer")
    return Field("arr", _elements(setting, old.item), old.item), ""


def _new_field(setting: Setting, metadata: Metadata) -> tuple[Field, str]:
    if setting.kind:
        kind = LOOSE[setting.kind][0] if setting.kind in LOOSE else setting.kind
        return Field(kind, _scalar(setting, kind, setting.text)), ""
    near = get_close_matches(setting.key, metadata, 1, cutoff=TOO_CLOSE)
    if near:
        hint = f"if the key is meant to be new, write its type: {setting.key}=str:..."
        raise UsageError(f"{setting.where}: the model has no such key; did you mean {near[0]}?", hint)
    kind = next((kind for pattern, kind in KNOWN if pattern.fullmatch(setting.key)), "") or _guessed(setting.text)
    return Field(kind, _scalar(setting, kind, setting.text)), f"{OPTION}: {setting.key} is new, written as {kind}"


def _guessed(text: str) -> str:
    """The type that llama.cpp most likely reads a value as."""
    if text.lower() in BOOLS:
        return "bool"
    for kind in ("u32", "i32", "u64", "f32"):
        try:
            _number(kind, text)
        except ValueError:
            continue
        return kind
    return "str"


def _scalar(setting: Setting, kind: str, text: str) -> Any:
    if kind == "str":
        return text
    try:
        return _number(kind, text)
    except ValueError as error:
        raise UsageError(f"{setting.where}: {text!r} is no {kind}: {error}", f"the key is of type {kind}") from error


def _number(kind: str, text: str) -> int | float | bool:
    """Raises ValueError that says why `text` is none."""
    if kind == "bool":
        if text.lower() not in BOOLS:
            raise ValueError("expected true or false")
        return BOOLS[text.lower()]
    if kind in FLOATS:
        value = float(text)
        if not math.isfinite(value) or (kind == "f32" and abs(value) > LARGEST_F32):
            raise ValueError("it is not finite")
        return value
    signed, bits = INTEGERS[kind]
    try:
        number = int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None
    if not -signed << bits <= number < 1 << bits:
        raise ValueError(f"expected {-signed << bits} to {(1 << bits) - 1}")
    return number


def _elements(setting: Setting, item: str) -> list[Any]:
    try:
        values = json.loads(setting.text)
    except ValueError as error:
        raise UsageError(f"{setting.where}: the key is an array of {item}: {error}", "write it as JSON, like [1, 2]") from error
    if not isinstance(values, list):
        raise UsageError(f"{setting.where}: the key is an array of {item}, the value is none", "write it as JSON, like [1, 2]")
    text: Callable[[Any], str] = (lambda value: str(value).lower()) if item == "bool" else str
    if item == "str" and not all(isinstance(value, str) for value in values):
        raise UsageError(f"{setting.where}: not all of {setting.text} are texts", 'write them as JSON, like ["a", "b"]')
    return [_scalar(setting, item, text(value)) for value in values]


def _called(field: Field) -> str:
    return f"an array of {field.item}" if field.kind == "arr" else field.kind
