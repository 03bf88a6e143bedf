"""Recipes: which type the tensors of each role get, as data in `recipes/NAME.toml`. The file's stem is the `--type` value.

    description = "one line for the help"
    file_type = "iq4_nl"                    what general.file_type says: a name of file_types.FILE_TYPES
    [[rule]]                                ordered; the first that matches wins
    roles = ["attention", "deltanet"]       roles of a3b_gguf.roles, and/or
    name = "blk.*.attn_v.weight"            a glob over the whole tensor name
    type = "q8_0"                           a type that ggml can write, or "keep"
    why = "one clause"                      shown as the reason

What a rule cannot break: a vector is never quantized, and a row that the block does not divide gets llama.cpp's replacement.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.llama.ggml import WRITABLE
from a3b_gguf.roles import ROLES
from a3b_gguf.tensors import TYPES, GGMLType, Model, TensorSource
from a3b_quantize.assign import Assignment, fit, n_dims, roles
from a3b_quantize.file_types import FILE_TYPES

KEEP = "keep"
RULE_KEYS = {"roles", "name", "type", "why"}
RECIPE_KEYS = {"description", "file_type", "rule"}


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors with one of `roles` (any role when empty) whose name matches the glob `name` get `type`; None keeps theirs."""

    roles: frozenset[str]
    name: str
    type: GGMLType | None
    why: str

    def matches(self, role: str, name: str) -> bool:
        return (not self.roles or role in self.roles) and fnmatchcase(name, self.name)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered rules. file_type: what the file's metadata will say."""

    name: str
    description: str
    file_type: str
    rules: tuple[Rule, ...]


def names() -> tuple[str, ...]:
    """The recipes that exist."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml")))


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises UsageError that lists the names."""
    if name not in names():
        raise UsageError(f"there is no recipe {name!r}", f"known: {', '.join(names())}")
    return parse_recipe(name, _folder().joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def parse_recipe(name: str, text: str) -> Recipe:
    """The recipe in `text`. Raises BadInput that names the recipe, the rule's number and what is wrong with it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"recipe {name}: {error}") from error
    _only(data, RECIPE_KEYS, f"recipe {name}")
    file_type = data.get("file_type")
    if file_type not in FILE_TYPES:
        raise BadInput(f"recipe {name}: file_type is {file_type!r}, expected one of {', '.join(FILE_TYPES)}")
    rules: list[Rule] = []
    for number, row in enumerate(data.get("rule", ()), 1):
        rules.append(_rule(row, f"recipe {name}, rule {number}"))
        shadow = _shadow(rules)
        if shadow:
            raise BadInput(f"recipe {name}, rule {number} can never match: rule {shadow} takes all its tensors", "move it up or remove it")
    if not rules:
        raise BadInput(f"recipe {name} has no rules")
    return Recipe(name, str(data.get("description", "")), file_type, tuple(rules))


def recipe_assignments(model: Model, recipe: Recipe) -> tuple[Assignment, ...]:
    """The type that `recipe` gives each tensor of `model`, in the model's order. Raises BadInput for a tensor that no rule takes."""
    role = roles(model)
    return tuple(_assign(tensor, role[tensor.name], recipe) for tensor in model.tensors)


def _assign(tensor: TensorSource, role: str, recipe: Recipe) -> Assignment:
    rule = next((rule for rule in recipe.rules if rule.matches(role, tensor.name)), None)
    if rule is None:
        raise BadInput(
            f"recipe {recipe.name} has no rule for tensor {tensor.name} of role {role}", "add one, or a last rule with type keep"
        )
    kind, reason, fell_back = rule.type or tensor.type, f"{role}: {rule.why}", False
    if not kind.is_float and n_dims(tensor.shape) < 2:
        kind, reason = tensor.type, f"{role}: one-dimensional, never quantized"
    elif kind != tensor.type:
        kind, reason, fell_back = fit(kind, tensor.shape[-1], reason)
    return Assignment(tensor.name, tensor.shape, tensor.type, kind, role, reason, fell_back)


def _folder() -> Any:
    return files("a3b_quantize") / "recipes"


def _rule(row: dict[str, Any], where: str) -> Rule:
    _only(row, RULE_KEYS, where)
    wanted, kind = row.get("roles", []), row.get("type")
    if not isinstance(wanted, list) or not all(isinstance(role, str) for role in wanted):
        raise BadInput(f"{where}: roles is {wanted!r}, expected a list of names")
    unknown = [role for role in wanted if role not in ROLES]
    if unknown:
        raise BadInput(f"{where}: unknown role {unknown[0]!r}", f"known: {', '.join(ROLES)}")
    if not wanted and "name" not in row:
        raise BadInput(f"{where} has neither roles nor name", 'write name = "*" for all tensors')
    if kind != KEEP and str(kind) not in [known.name for known in WRITABLE]:
        raise BadInput(f"{where}: unknown type {kind!r}", f"known: {', '.join(known.name for known in WRITABLE)}, {KEEP}")
    return Rule(frozenset(wanted), str(row.get("name", "*")), None if kind == KEEP else TYPES[str(kind)], str(row.get("why", "")))


def _shadow(rules: list[Rule]) -> int | None:
    """The number of an earlier rule that takes every tensor the last one could."""
    *earlier, last = rules
    taken: set[str] = set()
    for number, rule in enumerate(earlier, 1):
        if rule.name not in ("*", last.name):
            continue
        if not rule.roles:
            return number
        taken |= rule.roles
        if taken >= (last.roles or set(ROLES)):
            return number
    return None


def _only(data: dict[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise BadInput(f"{where}: unknown key {unknown[0]!r}", f"known: {', '.join(sorted(known))}")
