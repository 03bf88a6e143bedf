"""The recipes and policies that are shipped: `recipes/NAME.toml` are values of `--type`, `policies/NAME.toml` of `--policy`."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from a3b_gguf.errors import UsageError
from a3b_quantize.policy_file import Recipe, parse_policy, read_policy

RECIPES, POLICIES = "recipes", "policies"
SUFFIX = ".toml"


def names(folder: str = RECIPES) -> tuple[str, ...]:
    """The recipes that exist, or the policies."""
    return tuple(sorted(path.name.removesuffix(SUFFIX) for path in _folder(folder).iterdir() if path.name.endswith(SUFFIX)))


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises UsageError that lists the names."""
    return _shipped(RECIPES, name)


def load_policy(text: str) -> Recipe:
    """The policy in the file `text`, or a shipped one of that name. Raises UsageError when there is neither, BadInput for a bad file."""
    path = Path(text)
    if path.is_file():
        return read_policy(path)
    name = text.removeprefix(f"{POLICIES}/").removesuffix(SUFFIX)
    if name in names(POLICIES):
        return _shipped(POLICIES, name)
    near = get_close_matches(name, names(POLICIES), 1)
    asked = f"; did you mean {near[0]}?" if near else ""
    wrong = f"{text} is not a file but a folder, a device or a pipe" if path.exists() else f"there is no file {text}{asked}"
    raise UsageError(f"--policy: {wrong}", f"give a TOML file, or a shipped one: {', '.join(names(POLICIES))}")


def _shipped(folder: str, name: str) -> Recipe:
    if name not in names(folder):
        raise UsageError(f"there is no recipe {name!r}", f"known: {', '.join(names(folder))}")
    return parse_policy(name, _folder(folder).joinpath(name + SUFFIX).read_text(encoding="utf-8"))


def _folder(name: str) -> Any:
    return files("a3b_quantize") / name
