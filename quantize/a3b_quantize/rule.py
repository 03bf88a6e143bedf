"""A rule: which tensors it speaks of (role, layers, names) and what it gives them (type, group size)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import u32
from a3b_gguf.roles import EXPERT_ROLES, ROLES, layer_of, roles_of
from a3b_gguf.tensors import GGMLType, Model

# Names that stand for several roles.
GROUPS: dict[str, tuple[str, ...]] = {
    "experts": EXPERT_ROLES,
    "ffn": (*EXPERT_ROLES, "shared_expert", "dense_ffn"),
    "embeddings": ("embedding", "output"),
}
MTP = "mtp"
RANGE = re.compile(r"(-?\d+)(?:-(-?\d+))?")
WORDS = re.compile(r"(first|last)\s+(\d+)")
LAYERS_HINT = 'write them like "0-3,36-39", "-1" for the last, "first 4" or "last 4"'


@dataclass(frozen=True, slots=True)
class Subject:
    """A tensor as rules see it. roles: its own, and "mtp" as well in a block behind the trunk. layer: None outside the blocks."""

    name: str
    role: str
    roles: frozenset[str]
    layer: int | None


@dataclass(frozen=True, slots=True)
class Subjects:
    """The tensors of a model. n_layer: layers of the trunk; n_all: with the MTP blocks behind them."""

    tensors: tuple[Subject, ...]
    n_layer: int
    n_all: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors that have one of `roles`, lie in `layers` and whose name matches one of `names` and `regex`; what is empty takes all.

    They get `type`, or keep theirs with `keep`, and `group_size`; what is None is left to later rules.
    layers: as written, see `layer_set`; names: globs over the whole name; regex: found anywhere in it.
    where: how messages call the rule; may_miss: whether it may match nothing, since it was written for several architectures.
    """

    where: str
    roles: frozenset[str] = frozenset()
    layers: str = ""
    names: tuple[str, ...] = ()
    regex: str = ""
    type: GGMLType | None = None
    keep: bool = False
    group_size: int | None = None
    why: str = ""
    may_miss: bool = False

    @property
    def decides_type(self) -> bool:
        return self.keep or self.type is not None

    def name_matches(self, name: str) -> bool:
        return (not self.names or any(glob_matches(glob, name) for glob in self.names)) and (
            not self.regex or re.search(self.regex, name) is not None
        )

    def matching(self, subjects: Subjects) -> Iterator[Subject]:
        """The tensors that the rule speaks of. Raises BadInput for layers that the model does not have."""
        layers = layer_set(self.layers, subjects, self.where) if self.layers else None
        for each in subjects.tensors:
            if (not self.roles or self.roles & each.roles) and (layers is None or each.layer in layers) and self.name_matches(each.name):
                yield each


def subjects_of(model: Model) -> Subjects:
    """The tensors of `model` with their roles and layers."""
    arch = model.architecture
    roles = roles_of(tensor.name for tensor in model.tensors)
    n_all = _scalar(model, f"{arch}.block_count", 1 + max((layer_of(name) or 0 for name in roles), default=-1))
    n_layer = n_all - _scalar(model, f"{arch}.nextn_predict_layers", 0)

    def subject(name: str) -> Subject:
        layer, role = layer_of(name), roles[name]
        also = (MTP,) if layer is not None and n_layer and layer >= n_layer else ()
        return Subject(name, role, frozenset((role, *also)), layer)

    return Subjects(tuple(subject(tensor.name) for tensor in model.tensors), n_layer, n_all)


def layer_set(text: str, subjects: Subjects, where: str) -> frozenset[int]:
    """The layers of "0-3,36-39", "-4--1", "first 4" or "last 4". Negative numbers count from the end of the trunk.

    Raises BadInput for text that is none of these and for layers that the model does not have.
    """
    found: set[int] = set()
    for first, last in layer_spans(text, where):
        first, last = (subjects.n_layer + end if end < 0 else end for end in (first, last))
        if not 0 <= first <= last < subjects.n_all:
            has = f"the model has layers 0 to {subjects.n_layer - 1}"
            mtp = f" and MTP behind them, up to {subjects.n_all - 1}" if subjects.n_all > subjects.n_layer else ""
            raise BadInput(f"{where}: layers {text!r} are not in the model: {has}{mtp}", LAYERS_HINT)
        found.update(range(first, last + 1))
    return frozenset(found)


def layer_spans(text: str, where: str) -> list[tuple[int, int]]:
    """(first, last) of each part, as written: negative ones not yet resolved. Raises BadInput for text that is no list of layers."""
    spans: list[tuple[int, int]] = []
    for part in (part.strip() for part in text.split(",")):
        words, numbers = WORDS.fullmatch(part), RANGE.fullmatch(part)
        if words and int(words[2]):
            count = int(words[2])
            spans.append((0, count - 1) if words[1] == "first" else (-count, -1))
        elif numbers:
            spans.append((int(numbers[1]), int(numbers[2] or numbers[1])))
        else:
            raise BadInput(f"{where}: {part!r} are no layers", LAYERS_HINT)
    return spans


def expand_roles(names: Iterable[str]) -> frozenset[str]:
    """Roles, with the names of GROUPS replaced by theirs. Unknown names stay."""
    return frozenset(role for name in names for role in GROUPS.get(name, (name,)))


def known_roles() -> tuple[str, ...]:
    """Everything that may stand where a role is asked for."""
    return (*ROLES, *GROUPS)


def glob_matches(glob: str, name: str) -> bool:
    return glob == name or (("*" in glob or "?" in glob or "[" in glob) and fnmatchcase(name, glob))


def _scalar(model: Model, key: str, default: int) -> int:
    value = model.metadata.get(key, u32(default)).value
    return value if isinstance(value, int) else default
