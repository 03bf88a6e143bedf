"""Policies as TOML: ordered rules from role, layers and name to type and group size. The shipped recipes are such files too.

    description = "one line"                # for the help and the table's title
    file_type = "iq4_nl"                    # what general.file_type says, a name of FILE_TYPES; left out: what most weights got
    base = "iq4_nl"                         # the recipe that decides where no rule does; left out: every tensor needs a rule
    any_model = true                        # for several architectures: rules may match nothing. Left out: that is an error

    [[rule]]                                # ordered; for type and for group size alone, the first rule that gives one wins
    roles = ["attention", "deltanet"]       # of a3b_gguf.roles, or experts, ffn, embeddings; in an MTP block also "mtp"
    layers = "0-3,36-39"                    # also "-1" (the last), "-4--1", "first 4", "last 4"; negative ones of the trunk
    name = "blk.*.attn_v.weight"            # a glob over the whole tensor name, or a list of them
    regex = "attn_(k|v)"                    # a regular expression found anywhere in the name, case kept
    type = "q8_0"                           # a type that ggml can write, or "keep"
    group_size = 64                         # 32, 64 or 128: how many weights share a scale; more than 32 with iq4_nl only
    why = "one clause"                      # shown as the reason

A rule names at least one of roles, layers, name, regex, and at least one of type, group_size. What it cannot break: vectors, norms and
convolutions are never quantized, and a row that the block does not divide gets llama.cpp's replacement.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.ggml import WRITABLE
from a3b_gguf.part import write_file
from a3b_gguf.roles import ROLES
from a3b_gguf.tensors import TYPES
from a3b_quantize.file_types import FILE_TYPES
from a3b_quantize.kernels import GROUP_SIZES
from a3b_quantize.rule import Rule, expand_roles, known_roles, layer_spans

KEEP = "keep"
SELECTORS = ("roles", "layers", "name", "regex")
RULE_KEYS = (*SELECTORS, "type", "group_size", "why")
FILE_KEYS = ("description", "file_type", "base", "any_model", "rule")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered rules. file_type: a name of FILE_TYPES, or "" for what most weights got; base: a recipe's name, or ""."""

    name: str
    description: str
    file_type: str
    rules: tuple[Rule, ...]
    base: str = ""
    any_model: bool = False


def read_policy(path: Path) -> Recipe:
    """The policy in a TOML file, called by the file's stem. Raises BadInput that names the file, the rule's number and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "give a TOML file with [[rule]] tables") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text", "give a TOML file with [[rule]] tables") from error
    return parse_policy(path.stem, text, str(path))


def write_policy(path: Path, policy: Recipe) -> None:
    """Writes a file that `read_policy` reads as the same policy."""
    write_file(path, format_policy(policy).encode())


def format_policy(policy: Recipe) -> str:
    """The policy as TOML."""
    top: dict[str, Any] = {"description": policy.description, "file_type": policy.file_type, "base": policy.base}
    tables = [{key: value for key, value in top.items() if value} | ({"any_model": True} if policy.any_model else {})]
    tables += [_row(rule) for rule in policy.rules]
    texts = ["".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items()) for table in tables]
    return "\n[[rule]]\n".join(texts)


def parse_policy(name: str, text: str, where: str = "") -> Recipe:
    """The policy in `text`. where: how messages call it. Raises BadInput as `read_policy` does."""
    where = where or f"recipe {name}"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: {error}") from error
    _only(data, FILE_KEYS, where)
    file_type, any_model = data.get("file_type", ""), data.get("any_model", False)
    if file_type != "" and file_type not in tuple(FILE_TYPES):
        raise BadInput(f"{where}: file_type is {file_type!r}, expected one of {', '.join(FILE_TYPES)}")
    if not isinstance(any_model, bool):
        raise BadInput(f"{where}: any_model is {any_model!r}, expected true or false")
    rows = data.get("rule", [])
    if not isinstance(rows, list) or not rows:
        raise BadInput(f"{where} has no rules", "write at least one [[rule]] table")
    rules: list[Rule] = []
    for number, row in enumerate(rows, 1):
        rules.append(_rule(row, f"{where}, rule {number}", any_model))
        shadow = _shadow(rules)
        if shadow:
            raise BadInput(f"{where}, rule {number} can never match: rule {shadow} takes all its tensors", "move it up or remove it")
    return Recipe(name, str(data.get("description", "")), file_type, tuple(rules), str(data.get("base", "")), any_model)


def _row(rule: Rule) -> dict[str, Any]:
    names: Any = rule.names[0] if len(rule.names) == 1 else list(rule.names)
    found = {
        "roles": [role for role in ROLES if role in rule.roles], "layers": rule.layers, "name": names, "regex": rule.regex,
        "type": KEEP if rule.keep else rule.type.name if rule.type else "", "group_size": rule.group_size, "why": rule.why,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value}


def _rule(row: Any, where: str, may_miss: bool) -> Rule:
    if not isinstance(row, dict):
        raise BadInput(f"{where} is {row!r}, expected a [[rule]] table")
    _only(row, RULE_KEYS, where)
    if not any(key in row for key in SELECTORS):
        raise BadInput(f"{where} has neither roles, layers, name nor regex", 'write name = "*" for all tensors')
    if "type" not in row and "group_size" not in row:
        raise BadInput(f"{where} has neither type nor group_size", "say what the tensors get")
    names, kind = row.get("name", []), row.get("type")
    if kind is not None and kind != KEEP and kind not in [known.name for known in WRITABLE]:
        raise BadInput(f"{where}: unknown type {kind!r}", f"known: {', '.join(known.name for known in WRITABLE)}, {KEEP}")
    return Rule(
        where,
        roles=_roles(row.get("roles", []), where),
        layers=_layers(row.get("layers", ""), where),
        names=_texts([names] if isinstance(names, str) else names, f"{where}: name"),
        regex=_regex(row.get("regex", ""), where),
        type=TYPES[kind] if kind is not None and kind != KEEP else None,
        keep=kind == KEEP,
        group_size=_group_size(row.get("group_size"), where),
        why=str(row.get("why", "")),
        may_miss=may_miss,
    )


def _roles(names: Any, where: str) -> frozenset[str]:
    for name in _texts(names, f"{where}: roles"):
        if name not in known_roles():
            near = get_close_matches(name, known_roles(), 1)
            asked = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"{where}: unknown role {name!r}{asked}", f"known: {', '.join(known_roles())}")
    return expand_roles(names)


def _layers(text: Any, where: str) -> str:
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str):
        raise BadInput(f"{where}: layers is {text!r}, expected a text", 'write it like "0-3,36-39"')
    if text:
        layer_spans(text, where)
    return text


def _regex(text: Any, where: str) -> str:
    try:
        re.compile(text)
    except (re.error, TypeError) as error:
        raise BadInput(f"{where}: {text!r} is no regular expression: {error}") from error
    return str(text)


def _group_size(value: Any, where: str) -> int | None:
    if value is not None and (isinstance(value, bool) or value not in GROUP_SIZES):
        raise BadInput(f"{where}: group_size is {value!r}, expected one of {', '.join(map(str, GROUP_SIZES))}")
    return value


def _texts(values: Any, where: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise BadInput(f"{where} is {values!r}, expected a list of names")
    return tuple(values)


def _shadow(rules: list[Rule]) -> int | None:
    """The number of an earlier rule that takes every tensor the last one could."""
    *earlier, last = rules
    taken: set[str] = set()
    for number, rule in enumerate(earlier, 1):
        if not _covers(rule, last):
            continue
        if not rule.roles:
            return number
        taken |= rule.roles
        if taken >= (last.roles or set(ROLES)):
            return number
    return None


def _covers(rule: Rule, later: Rule) -> bool:
    """Whether `rule` gives everything that `later` would, to tensors of all names and layers that `later` has, roles aside."""
    gives = (rule.decides_type or not later.decides_type) and (rule.group_size is not None or later.group_size is None)
    everything = rule.names in ((), ("*",)) and not rule.layers and not rule.regex
    return gives and (everything or (rule.names, rule.layers, rule.regex) == (later.names, later.layers, later.regex))


def _only(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise BadInput(f"{where}: unknown key {unknown[0]!r}", f"known: {', '.join(sorted(known))}")
