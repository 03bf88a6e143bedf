"""Applies rules to a model: every tensor gets a type and a group size, and every rule that did nothing is told about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.tensors import Model, TensorSource
from a3b_quantize.assign import Assignment, fit, n_dims
from a3b_quantize.kernels import BLOCK, GROUPED
from a3b_quantize.rule import Rule, Subject, Subjects, subjects_of
from a3b_quantize.stock import why_protected

NEAREST = 5  # names that a rule which matches nothing may have meant


@dataclass(frozen=True, slots=True)
class Assigned:
    """The decision about every tensor, in the model's order, and what the user should know about it."""

    assignments: tuple[Assignment, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Matches:
    """What each rule speaks of, in the rules' order: `names` of tensors; `types` and `sizes` by tensor: the rule that decides."""

    names: tuple[frozenset[str], ...]
    types: Mapping[str, Rule]
    sizes: Mapping[str, Rule]


def match(model: Model, rules: Sequence[Rule]) -> Matches:
    """Finds for each tensor the first rule that gives it a type and the first that gives it a group size.

    Raises UsageError for a rule that matches nothing, that only matches what it cannot change, or that earlier rules leave nothing.
    """
    subjects = subjects_of(model)
    fixed = {tensor.name: why_fixed(tensor) for tensor in model.tensors}
    vectors = {tensor.name for tensor in model.tensors if n_dims(tensor.shape) < 2}
    names: list[frozenset[str]] = []
    types: dict[str, Rule] = {}
    sizes: dict[str, Rule] = {}
    for rule in rules:
        found = list(rule.matching(subjects))
        if not found and not rule.may_miss:
            raise _nothing(rule, subjects)
        changed = [each for each in found if not (_quantizes(rule) and (fixed[each.name] or each.name in vectors))]
        if found and not changed and not rule.may_miss:
            first = found[0].name
            why = fixed[first] or "is one-dimensional, never quantized"
            raise UsageError(f"{rule.where}: {first} {why}, and nothing else matches", "leave the rule out")
        free = [each for each in found if not (_quantizes(rule) and fixed[each.name])]
        won = [each for each in free if _take(rule, each, types, sizes)]
        if free and not won and not rule.may_miss:
            earlier = (types if rule.decides_type else sizes)[free[0].name]
            raise UsageError(
                f"{rule.where} changes nothing: {earlier.where} comes first and takes {free[0].name} and all others",
                "the first rule that matches wins: move it up, or make the other one narrower",
            )
        names.append(frozenset(each.name for each in found))
    return Matches(tuple(names), types, sizes)


def _take(rule: Rule, subject: Subject, types: dict[str, Rule], sizes: dict[str, Rule]) -> bool:
    """Gives a tensor what the rule decides and no earlier one did. Whether that was anything."""
    before = len(types) + len(sizes)
    if rule.decides_type:
        types.setdefault(subject.name, rule)
    if rule.group_size is not None:
        sizes.setdefault(subject.name, rule)
    return len(types) + len(sizes) > before


def decide(model: Model, rules: Sequence[Rule], found: Matches, base: Mapping[str, Assignment]) -> Assigned:
    """Types and group sizes by the rules that `match` found; `base` decides where no rule gives a type.

    Raises BadInput for a tensor that neither speaks of.
    """
    roles = {each.name: each.role for each in subjects_of(model).tensors}
    decided = tuple(_sized(_typed(tensor, roles[tensor.name], found.types, base), found.sizes) for tensor in model.tensors)
    return Assigned(decided, (*_spared(model, rules, found), *_sizes_in_vain(rules, found, decided)))


def _typed(tensor: TensorSource, role: str, types: Mapping[str, Rule], base: Mapping[str, Assignment]) -> Assignment:
    rule = types.get(tensor.name)
    if rule is None:
        if tensor.name not in base:
            raise BadInput(f"no rule for tensor {tensor.name} of role {role}", "add one, a last rule with type keep, or a base")
        return base[tensor.name]
    kind, reason, fell_back = rule.type or tensor.type, f"{role}: {rule.why or rule.where}", False
    if not kind.is_float and n_dims(tensor.shape) < 2:
        kind, reason = tensor.type, f"{role}: one-dimensional, never quantized"
    elif kind != tensor.type:
        kind, reason, fell_back = fit(kind, tensor.shape[-1], reason)
    return Assignment(tensor.name, tensor.shape, tensor.type, kind, role, reason, fell_back)


def _sized(assignment: Assignment, sizes: Mapping[str, Rule]) -> Assignment:
    rule = sizes.get(assignment.name)
    if rule is None or not _can_group(assignment):
        return assignment
    return replace(assignment, group_size=rule.group_size or BLOCK)


def _can_group(assignment: Assignment) -> bool:
    return assignment.type.name in GROUPED and assignment.type != assignment.source


def why_fixed(tensor: TensorSource) -> str:
    """Why a matrix is never quantized, or "". Vectors are no news to anybody: see `_typed`."""
    if n_dims(tensor.shape) < 2:
        return ""
    why = why_protected(tensor.name, tensor.shape)
    return "" if not why else f"is never quantized ({why})" if why == "not a weight" else "is never quantized"


def _quantizes(rule: Rule) -> bool:
    return rule.type is not None and not rule.type.is_float


def _nothing(rule: Rule, subjects: Subjects) -> UsageError:
    """The error for a rule that matches no tensor, with the names that come nearest."""
    names = [each.name for each in subjects.tensors]
    asked = rule.regex or (rule.names[0] if rule.names else "")
    if not asked:
        present = sorted({role for each in subjects.tensors for role in each.roles})
        return UsageError(f"{rule.where} matches no tensor of this model", f"it has the roles {', '.join(present)}")
    folded = [name for name in names if rule.regex and re.search(rule.regex, name, re.IGNORECASE)]
    if folded:
        return UsageError(f"{rule.where} matches no tensor: upper and lower case differ", f"with other case it would match {folded[0]}")
    return UsageError(f"{rule.where} matches no tensor of this model", f"the nearest names: {', '.join(nearest(asked, names))}")


def nearest(asked: str, names: Sequence[str]) -> list[str]:
    """Names of tensors that a pattern may have meant: of one layer each, since they repeat."""
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+|blk|weight|\d+", ".", asked).strip(".")
    ends = dict.fromkeys(re.sub(r"^blk\.\d+\.", "", name) for name in names)
    near = get_close_matches(plain, [end.removesuffix(".weight") for end in ends], NEAREST, cutoff=0.5)
    found = [next(name for name in names if name.endswith((end, end + ".weight"))) for end in near]
    return found or list(names[:NEAREST])


def _spared(model: Model, rules: Sequence[Rule], found: Matches) -> list[str]:
    """Notes about tensors that a rule would quantize and that never are."""
    why = {tensor.name: text for tensor in model.tensors if (text := why_fixed(tensor))}
    notes = []
    for rule, names in zip(rules, found.names, strict=True):
        spared = sorted(names & why.keys())
        if spared and _quantizes(rule) and not rule.may_miss:
            more = f" and {len(spared) - 1} more" if len(spared) > 1 else ""
            notes.append(f"{rule.where} does not reach {spared[0]}{more}: it {why[spared[0]]}")
    return notes


def _sizes_in_vain(rules: Sequence[Rule], found: Matches, decided: Sequence[Assignment]) -> list[str]:
    """Notes about group sizes that a type cannot have. Raises UsageError for a rule of which no tensor can."""
    notes = []
    for rule in rules:
        if rule.group_size in (None, BLOCK):
            continue
        sized = [each for each in decided if found.sizes.get(each.name) == rule and n_dims(each.shape) > 1]
        cannot = [each for each in sized if not _can_group(each)]
        if not cannot:
            continue
        kinds = ", ".join(sorted({each.type.name for each in cannot}))
        why = f"{kinds} blocks each have their own scale, only those of {', '.join(GROUPED)} can share one"
        if len(cannot) == len(sized) and not rule.decides_type and not rule.may_miss:
            hint = f"give these tensors a type first, such as --tensor-type '{sized[0].name}=iq4_nl', or take --policy write-up"
            raise UsageError(f"{rule.where} changes nothing: {sized[0].name} is {sized[0].type.name}, and {why}", hint)
        notes.append(f"{rule.where}: {len(cannot)} of {len(sized)} tensors keep a scale for each block: {why}")
    return notes
