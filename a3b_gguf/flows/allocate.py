"""`a3b quantize --target-size | --target-bpw`: the best type for each tensor that fits, as a policy that is written beside the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from a3b_gguf.errors import AnswerIsNo, UsageError
from a3b_gguf.flows.allocation_limits import Protection, limited, protections, told
from a3b_gguf.flows.measure_sensitivity import WISHES, sensitivities, weighting
from a3b_gguf.flows.protection import limits_for, protected
from a3b_gguf.flows.quantize_options import Options, check_flags, refuse_unwritable
from a3b_gguf.flows.quantize_plan import Prepared, Source, default_output, open_source, prepare_with
from a3b_gguf.gguf_file import DEFAULT_ALIGNMENT
from a3b_gguf.llama.ggml import WRITABLE
from a3b_gguf.part import written
from a3b_gguf.tensors import TYPES, GGMLType
from a3b_gguf.units import human_bytes
from a3b_quantize.allocate import CANDIDATES, Chosen, Unit, allowed, choose, grouped, largest, smallest, unit
from a3b_quantize.assign import Assignment
from a3b_quantize.decide import match
from a3b_quantize.overrides import override_rules
from a3b_quantize.policy import Policy, choose_policy, recipe_policy
from a3b_quantize.policy_file import Recipe, write_policy
from a3b_quantize.protect import Limit
from a3b_quantize.recipe import names
from a3b_quantize.rule import Rule
from a3b_quantize.sampling_errors import relative_errors, take_sample
from a3b_quantize.sensitivity import Sensitivities

DEFAULT_BASE = "iq4_nl"
SUFFIX = ".policy.toml"

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Target:
    """How large the result may be: n_bytes of all files, or bits_per_weight of all tensors; the other is None.

    sensitivity: auto, measure, estimate or table. candidates: types to choose from; data: texts to measure sensitivity on, as for
    calibration.
    """

    n_bytes: int | None = None
    bits_per_weight: float | None = None
    sensitivity: str = "auto"
    candidates: tuple[str, ...] = CANDIDATES
    data: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    """What was chosen. loss: predicted mean KL divergence in nats, good for comparing when `measured` is false; base_loss: of `base`.

    policy: where the choice stands as TOML, None in a dry run. smallest, largest: bytes that can be asked for. protected: what the ranges
    of --calibration limit, and what that costs; free_loss: predicted for the same target without these limits.
    """

    n_bytes: int
    loss: float
    base: str
    base_bytes: int
    base_loss: float
    smallest: int
    largest: int
    measured: bool
    how: str
    policy: Path | None
    notes: tuple[str, ...]
    protected: tuple[Protection, ...] = ()
    free_loss: float | None = None


def check_target(target: Target) -> None:
    """Raises UsageError for a target that is none."""
    if target.n_bytes is not None and target.bits_per_weight is not None:
        raise UsageError("--target-size and --target-bpw exclude each other", "give one of them")
    if target.n_bytes is not None and target.n_bytes < 1:
        raise UsageError(f"--target-size: {target.n_bytes} bytes are no size", "write it like 16GiB, 16GB or 512MiB")
    if target.bits_per_weight is not None and not 0.5 < target.bits_per_weight < 64:
        raise UsageError(f"--target-bpw: {target.bits_per_weight} bits a weight cannot be", "write it like 4.3")
    if target.sensitivity not in WISHES:
        raise UsageError(f"--sensitivity: there is no {target.sensitivity!r}", f"known: {', '.join(WISHES)}")
    known = [kind.name for kind in WRITABLE if not kind.is_float]
    unknown = [name for name in target.candidates if name not in known]
    if unknown:
        hint = f"known: {', '.join(known)}; the default: {','.join(CANDIDATES)}"
        raise UsageError(f"--candidates: {unknown[0]!r} is no type to choose", hint)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A source, and what each tensor that may change its type loses with each candidate: `losses` by tensor and type.

    groups: tensors that share a type; pinned: tensors whose type a flag names; assigned: what the recipe `base` gives; standard: the same,
    protected by the ranges of --calibration; limits: what these ask of an allocation; changed: types that they change outside the groups.
    """

    source: Source
    options: Options
    base: Policy
    standard: tuple[Assignment, ...]
    assigned: tuple[Assignment, ...]
    pinned: frozenset[str]
    groups: tuple[tuple[Assignment, ...], ...]
    losses: Mapping[str, Mapping[str, float]]
    found: Sensitivities
    limits: Mapping[str, Limit] = field(default_factory=dict)
    changed: Mapping[str, GGMLType] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def prepare_allocated(
    source: Path, output: Path | None, options: Options, target: Target, write: bool, shown: Callable[[str], Tell] | None = None
) -> tuple[Prepared, Allocation]:
    """Opens the source, weighs every type for every tensor, chooses, and prepares the writing. write: also write the policy's file.

    Raises AnswerIsNo when the smallest choice is larger than the target, and says how large it is.
    """
    check_target(target)
    for path in filter(None, (output, options.report)):  # before the long work
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is not a folder", "the folder of the output must exist")
        if write:
            refuse_unwritable(path)
    unweighed = _unweighed(source, options)
    place = output or default_output(source, replace(unweighed.base, name=_name(target)))
    if write:
        _refuse_policy(place, options)
    _refuse_early(unweighed, place, target)
    return fit_target(_weighed(unweighed, target, shown), place, target, write)


def policy_path(output: Path) -> Path:
    """Where the choice of types is written: beside the output."""
    return output.with_name(output.name.removesuffix(".gguf") + SUFFIX)


def _refuse_policy(output: Path, options: Options) -> None:
    """Raises UsageError when the policy's file has no place, before minutes of measuring."""
    policy = written(policy_path(output), "the policy beside the output:")
    refuse_unwritable(policy)
    for path in filter(None, (options.report, *options.inputs)):
        if path.resolve() == policy.resolve():
            raise UsageError(f"{path} is where the policy beside the output is written", "choose another name with -o")


def weigh(path: Path, options: Options, target: Target, shown: Callable[[str], Tell] | None = None) -> Weighed:
    """Everything that does not depend on how large the target is: with it, one more budget takes no time."""
    return _weighed(_unweighed(path, options), target, shown)


def _unweighed(path: Path, options: Options) -> Weighed:
    """What is known before anything is measured: every unit is taken for one that can be weighed, and no loss is known."""
    options = _checked(options)
    base = choose_policy(options.choice)
    check_flags(options)
    source = open_source(path, options, base)
    assigned = base.assign(source.model, source.weights is not None)
    limits, notes = limits_for(assigned, source.model, options)
    standard = protected(assigned, source.model, options).assignments
    pinned = _pinned(base, source)
    groups = grouped(standard, pinned)
    if not groups:
        raise UsageError(f"{base.name} quantizes no tensor of {path}", "choose another --type")
    changed = _changed(assigned.assignments, standard, groups)
    nothing = Sensitivities({}, False, "not measured")
    return Weighed(source, options, base, standard, assigned.assignments, pinned, tuple(groups), {}, nothing, limits, changed, notes)


def _weighed(unweighed: Weighed, target: Target, shown: Callable[[str], Tell] | None) -> Weighed:
    tell = shown or (lambda what: lambda done, total: None)
    source, groups = unweighed.source, unweighed.groups
    found = sensitivities(source, groups, unweighed.options, target.sensitivity, target.data, tell("measure sensitivity"))
    known = tuple(group for group in groups if all(found.of(each.name) is not None for each in group))  # others keep the recipe's type
    changed = _changed(unweighed.assigned, unweighed.standard, known)
    weighed = replace(unweighed, groups=known, found=found, changed=changed)
    return replace(weighed, losses=_losses(weighed, target, tell("weigh types")))


def _refuse_early(unweighed: Weighed, output: Path, target: Target) -> None:
    """Raises AnswerIsNo for a target that the smallest types of all tensors exceed, which minutes of measuring would not change.

    What would work is told with the projections of an MTP block as the recipe has them, since only the table knows their sensitivity.
    """
    losses = {each.name: dict.fromkeys(TYPES, 0.0) for group in unweighed.groups for each in group}
    everything = replace(unweighed, losses=losses)
    try:
        fit_target(everything, output, target, write=False)
    except AnswerIsNo:
        if target.sensitivity != "table":
            groups = tuple(group for group in unweighed.groups if ".nextn." not in group[0].name)
            fit_target(replace(everything, groups=groups), output, target, write=False)
        raise


def fit_target(weighed: Weighed, output: Path, target: Target, write: bool) -> tuple[Prepared, Allocation]:
    """The choice of least loss for one target. Raises AnswerIsNo when the smallest choice is larger."""
    units = [_unit(weighed, group, target, weighed.limits) for group in weighed.groups]
    free = [_unit(weighed, group, target, {}) for group in weighed.groups]
    as_base = prepare_with(weighed.source, weighed.base, output, weighed.options, protect=True)
    rest = _rest(as_base, {each.name for group in weighed.groups for each in group}, target)
    sized = _Sized(weighed, output, rest, target, protections(units, free, weighed.limits))
    chosen, prepared = sized.fit(units)
    allocation = Allocation(
        n_bytes=_total(prepared),
        loss=chosen.loss,
        base=weighed.base.name,
        base_bytes=_total(as_base),
        base_loss=sum(weighed.losses[each.name][each.type.name] for group in weighed.groups for each in group),
        smallest=sized.at(smallest(units)),
        largest=sized.at(largest(units)),
        measured=weighed.found.measured,
        how=weighed.found.how,
        policy=policy_path(output) if write else None,
        notes=(*weighed.notes, *_notes(sized, units)),
        protected=sized.protected,
        free_loss=choose(free, chosen.n_bytes).loss if sized.protected else None,
    )
    if allocation.policy is not None:
        write_policy(allocation.policy, sized.recipe(chosen, whole=True))
    return prepared, allocation


def _checked(options: Options) -> Options:
    """Options that leave the types to the allocation. Raises UsageError for flags that would choose them."""
    if options.stock or options.pure or options.policy:
        raise UsageError("--stock, --pure and --policy choose the types themselves", "leave them out, or --target-size and --target-bpw")
    name = (options.type_name or DEFAULT_BASE).lower()
    if name not in names():
        raise UsageError(
            f"--type {options.type_name}: with a target it must be a recipe, which says what stays a float", f"known: {', '.join(names())}"
        )
    return replace(options, type_name=name)


def _pinned(base: Policy, source: Source) -> frozenset[str]:
    """Tensors whose type a flag names: they keep it."""
    decided = match(source.model, base.rules).types
    return frozenset(name for name, rule in decided.items() if rule.where.startswith("--"))


def _changed(before: Sequence[Assignment], after: Sequence[Assignment], groups: Sequence[Sequence[Assignment]]) -> dict[str, GGMLType]:
    """Types that the ranges changed of tensors that are in no group."""
    inside = {each.name for group in groups for each in group}
    return {new.name: new.type for old, new in zip(before, after, strict=True) if new.type != old.type and new.name not in inside}


def _losses(weighed: Weighed, target: Target, tell: Tell) -> Mapping[str, Mapping[str, float]]:
    """By tensor and type, the recipe's own type among them. Raises UsageError when no candidate fits a tensor's rows, or none is safe."""
    source, groups = weighed.source, weighed.groups
    tensors = {tensor.name: tensor for tensor in source.model.tensors}
    losses = {}
    for number, group in enumerate(groups):
        kinds = _kinds(weighed, group, target)
        for each in group:
            wanted = list(dict.fromkeys((*kinds, *limited(group, kinds, weighed.limits), each.type)))
            errors = relative_errors(take_sample(tensors[each.name], *weighting(source, each.name)), wanted, weighed.options.encoding)
            losses[each.name] = {name: (weighed.found.of(each.name) or 0.0) * error for name, error in errors.items()}
        tell(number + 1, len(groups))
    return losses


def _kinds(weighed: Weighed, group: Sequence[Assignment], target: Target) -> list[GGMLType]:
    """The candidates for a unit, smallest first. Raises UsageError when there are none."""
    kinds = allowed(group, target.candidates, _weighted(weighed.source, group))
    if not kinds:
        raise UsageError(f"--candidates: no type fits the rows of {group[0].name}", "add q8_0 or iq4_nl")
    return kinds


def _weighted(source: Source, group: Sequence[Assignment]) -> bool:
    """Whether importance is known of every tensor of a unit."""
    return all(each.name in source.importance for each in group)


def _unit(weighed: Weighed, group: Sequence[Assignment], target: Target, limits: Mapping[str, Limit]) -> Unit:
    kinds = limited(group, _kinds(weighed, group, target), limits)
    options = {kind.name: sum(weighed.losses[each.name][kind.name] for each in group) for kind in kinds}
    return unit(group, options, int if target.n_bytes is None else _padded)


@dataclass(frozen=True, slots=True)
class _Sized:
    """Turns a budget for the whole output into one for the units, exactly, by laying the files out."""

    weighed: Weighed
    output: Path
    rest: int
    target: Target
    protected: tuple[Protection, ...] = ()

    @property
    def n_weights(self) -> int:
        return sum(each.n_weights for each in self.weighed.standard)

    @property
    def asked(self) -> str:
        return f"{self.target.n_bytes:,} bytes" if self.target.n_bytes is not None else f"{self.target.bits_per_weight:g} bits a weight"

    def fit(self, units: Sequence[Unit]) -> tuple[Chosen, Prepared]:
        """The best choice whose files are not larger than the target. Raises AnswerIsNo when there is none."""
        budget = self._tensor_budget(units)
        for _ in range(4):  # the header may differ by the length of a name
            if budget < smallest(units):
                raise self._impossible(units)
            chosen = choose(units, budget)
            policy = self._policy(self.recipe(chosen))
            prepared = prepare_with(self.weighed.source, policy, self.output, self.weighed.options)
            over = 0 if self.target.n_bytes is None else _total(prepared) - self.target.n_bytes
            if over <= 0:
                return chosen, prepared
            budget = min(budget, chosen.n_bytes) - over
        raise self._impossible(units)

    def at(self, unit_bytes: int) -> int:
        """Bytes of the output when the units take `unit_bytes`; of its tensors for a target in bits a weight."""
        return unit_bytes + self.rest

    def _tensor_budget(self, units: Sequence[Unit]) -> int:
        if self.target.n_bytes is not None:
            return self.target.n_bytes - self.rest
        assert self.target.bits_per_weight is not None
        return int(self.target.bits_per_weight * self.n_weights / 8) - self.rest

    def _impossible(self, units: Sequence[Unit]) -> AnswerIsNo:
        least = self.at(smallest(units))
        if self.target.n_bytes is not None:
            would = f"--target-size {least} would work ({human_bytes(least)})"
        else:
            would = f"--target-bpw {np.ceil(8e4 * least / self.n_weights) / 1e4:.4f} would work"
        types = ",".join(self.target.candidates)
        why, hint = "", f"{would}; or add a type with --candidates"
        extra = sum(each.n_bytes for each in self.protected)
        if extra:
            why = f"; {extra:,} of them because measured ranges protect tensors: {told(self.protected)}"
            hint += f"; or take --imatrix instead of --calibration, which protects nothing, for {least - extra:,} bytes at least"
        return AnswerIsNo(f"{self.asked} are too few: with the types {types} the smallest is {least:,} bytes{why}", hint)

    def recipe(self, chosen: Chosen, whole: bool = False) -> Recipe:
        """The choice as a policy; with `whole` the tensors in it whose type a flag named, which otherwise come from the flags."""
        standard, pinned = self.weighed.standard, self.weighed.pinned
        named = {each.name: each.type for each in standard if each.name in pinned and each.type != each.source} if whole else {}
        named |= self.weighed.changed
        roles = {each.name: each.role for each in standard}
        by_type: dict[tuple[str, str], list[str]] = {}
        for name, kind in {**chosen.types, **named}.items():
            by_type.setdefault((roles[name], kind.name), []).append(name)
        rules = tuple(
            Rule("allocation", names=tuple(listed), type=TYPES[kind], why=f"allocated for {self.asked}")
            for (_, kind), listed in by_type.items()
        )
        about = f"Allocated for {self.asked}; predicted loss {chosen.loss:.6f} nats, sensitivity {self.weighed.found.how}"
        return Recipe(_name(self.target), about, "", rules, self.weighed.options.type_name or DEFAULT_BASE)

    def _policy(self, recipe: Recipe) -> Policy:
        policy, flags = recipe_policy(recipe), override_rules(self.weighed.options.tensor_types, self.weighed.options.group_sizes)
        return replace(policy, rules=(*flags, *policy.rules), overrides=tuple(rule.where.lstrip("-") for rule in flags))


def _rest(as_base: Prepared, in_units: set[str], target: Target) -> int:
    """Bytes of the output besides the units': the header and the other tensors; for a target in bits a weight the tensors alone."""
    if target.n_bytes is None:
        return sum(each.nbytes for each in as_base.assignments if each.name not in in_units)
    return _total(as_base) - sum(_padded(each.nbytes) for each in as_base.assignments if each.name in in_units)


def _notes(sized: _Sized, units: Sequence[Unit]) -> tuple[str, ...]:
    most = sized.at(largest(units))
    wanted = sized.target.n_bytes
    if wanted is None:
        wanted = int((sized.target.bits_per_weight or 0) * sized.n_weights / 8)
    if wanted <= most:
        return ()
    return (f"{sized.asked} are more than the largest choice takes ({most:,} bytes): every tensor got the type that loses least",)


def _name(target: Target) -> str:
    return f"{target.bits_per_weight:g}bpw" if target.n_bytes is None else human_bytes(target.n_bytes).replace(" ", "")


def _total(prepared: Prepared) -> int:
    return sum(file.n_bytes for file in prepared.files)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
