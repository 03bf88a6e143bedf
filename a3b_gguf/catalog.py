"""The models that a3b knows by name: models.toml as typed entries. Sizes and choices never come from here, they come from files."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from a3b_gguf.errors import BadInput, UsageError

FILE = "models.toml"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model and where it comes from. Dimensions are the checkpoint's; what nobody could check is None and left out of the file.

    parameters, active: total and used for one token, in billions, as published, MTP blocks and vision not counted.
    architecture: as GGUF files name it.
    """

    name: str
    architecture: str
    aliases: tuple[str, ...] = ()
    huggingface: str | None = None
    modelscope: str | None = None
    folder: str | None = None  # inside this repository
    parameters: float | None = None
    active: float | None = None
    n_layer: int | None = None
    n_embd: int | None = None
    n_head: int | None = None
    n_head_kv: int | None = None
    head_dim: int | None = None
    n_expert: int | None = None
    n_expert_used: int | None = None
    n_ff_expert: int | None = None
    n_ff_shared: int | None = None
    n_vocab: int | None = None
    n_ctx: int | None = None
    full_attention_interval: int | None = None
    ssm_conv_kernel: int | None = None
    ssm_state_size: int | None = None
    ssm_group_count: int | None = None
    ssm_time_step_rank: int | None = None
    n_layer_nextn: int | None = None


def entries(path: Path | None = None) -> tuple[ModelEntry, ...]:
    """Every model of `path`, or of the models.toml that came with a3b. Raises BadInput naming the file, the model and the key."""
    path = path or shipped()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {error}", "correct the file") from error
    listed = table.pop("model", [])
    if table or not isinstance(listed, list):
        raise BadInput(f"{path}: expected [[model]] tables and nothing else, found {', '.join(table) or 'model as a value'}")
    found = tuple(entry(values, f"{path}: model {i + 1}") for i, values in enumerate(listed))
    check_names(found, path)
    return found


def find(name: str, path: Path | None = None) -> ModelEntry | None:
    """The model with this name or alias, in any case, or None."""
    wanted = name.lower()
    return next((entry for entry in entries(path) if wanted in (entry.name.lower(), *map(str.lower, entry.aliases))), None)


def get(name: str, path: Path | None = None) -> ModelEntry:
    """The same; raises UsageError with the nearest names when there is none."""
    if entry := find(name, path):
        return entry
    known = {n.lower(): e.name for e in entries(path) for n in (e.name, *e.aliases)}
    near = dict.fromkeys(known[n] for n in get_close_matches(name.lower(), known, n=3, cutoff=0.5))
    raise UsageError(f"there is no model {name!r} in the catalog", f"near: {', '.join(near)}" if near else "`a3b models list` shows all")


def absent(source: Path, hint: str) -> BadInput:
    """The error for a path where nothing is; a name of the catalog is told where its checkpoint comes from."""
    entry = find(str(source))
    if entry is None or entry.huggingface is None:
        return BadInput(f"{source} does not exist", hint)
    download = f"download it first, like: hf download {entry.huggingface} --local-dir {entry.name}"
    return BadInput(f"{source} does not exist here, {entry.name} is a name of the catalog", download)


def shipped() -> Path:
    """models.toml beside the package (a wheel), or one folder up (an editable install)."""
    here = Path(__file__).parent
    for folder in (here, here.parent):
        if (folder / FILE).is_file():
            return folder / FILE
    raise BadInput(f"{FILE} is neither in {here} nor in {here.parent}", "install a3b again")


def entry(values: Any, where: str) -> ModelEntry:
    """One [[model]] table. Unknown keys and wrong types are refused: a typo must not become a missing fact."""
    if not isinstance(values, dict):
        raise BadInput(f"{where} is not a table")
    where = f"{where} ({values['name']})" if isinstance(values.get("name"), str) else where
    hints = get_type_hints(ModelEntry)
    if unknown := sorted(set(values) - set(hints)):
        near = get_close_matches(unknown[0], hints, n=1)
        raise BadInput(f"{where}: unknown key {unknown[0]}", f"did you mean {near[0]}?" if near else f"known: {', '.join(hints)}")
    for field in fields(ModelEntry):
        if field.default is MISSING and field.name not in values:
            raise BadInput(f"{where}: key {field.name} is missing")
    return ModelEntry(**{key: checked(value, hints[key], f"{where}: {key}") for key, value in values.items()})


def checked(value: Any, hint: Any, where: str) -> Any:
    kinds = tuple(kind for kind in get_args(hint) if kind is not type(None)) if isinstance(hint, UnionType) else (hint,)
    if kinds[0] == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif kinds[0] is str:
        if isinstance(value, str) and value:
            return value
    elif isinstance(value, int if kinds[0] is int else (int, float)) and not isinstance(value, bool) and value > 0:
        return kinds[0](value)
    expected = {str: "a string", int: "a whole number from 1", float: "a number above 0"}.get(kinds[0], "a list of strings")
    raise BadInput(f"{where} is {value!r}, expected {expected}")


def check_names(found: tuple[ModelEntry, ...], path: Path) -> None:
    """Raises BadInput when a name or an alias stands for two models, or twice for one."""
    seen: dict[str, str] = {}
    for model in found:
        for name in (model.name, *model.aliases):
            if name.lower() in seen:
                raise BadInput(f"{path}: {name} is a name of {seen[name.lower()]} and of {model.name}")
            seen[name.lower()] = model.name
