"""What the ranges of `--calibration DIR` change in the types that a policy chose, and the limits that they set for an allocation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from a3b_gguf.clip_bounds import FILE_NAME, Bounds, check_model_id, read_bounds
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.model_id import model_id_of
from a3b_gguf.tensors import Model
from a3b_quantize.decide import Assigned, match
from a3b_quantize.fit_imatrix import listed
from a3b_quantize.overrides import override_rules
from a3b_quantize.protect import Limit, limits, protected_types


def protected(assigned: Assigned, model: Model, options: Options) -> Assigned:
    """`assigned` with types that the ranges call for; a note says which tensors.

    Nothing changes with --stock, whose types are llama-quantize's, nor with --policy, nor for what --tensor-type names: there the ranges
    are only told. Raises BadInput for ranges of another model.
    """
    path = _path(options)
    if path is None:
        return assigned
    bounds = _bounds(path, model)
    if bounds is None:
        return replace(assigned, notes=(*assigned.notes, _missing(path)))
    named = match(model, override_rules(options.tensor_types, ())).types
    before = assigned.assignments
    pairs = list(zip(before, protected_types(before, bounds), strict=True))
    if options.policy:  # an allocation's policy keeps to the limits, and need not go beyond them
        asked = limits(before, bounds)
        pairs = [(each, each if each.name in asked and asked[each.name].allows(each.type) else new) for each, new in pairs]
    fixed = [each.name for each, new in pairs if new.type != each.type and (options.policy or each.name in named)]
    after = tuple(each if each.name in fixed else new for each, new in pairs)
    changed = [new for each, new in zip(before, after, strict=True) if new.type != each.type]
    notes = list(assigned.notes)
    if changed:
        first = changed[0]
        names = listed([each.name for each in changed])
        notes.append(f"measured ranges changed the type of {len(changed)} tensors ({names}); the first, {first.reason}")
    if fixed:
        notes.append(f"measured ranges speak against the type of {len(fixed)} tensors that you chose: {listed(fixed)}")
    return Assigned(after, tuple(notes))


def limits_for(assigned: Assigned, model: Model, options: Options) -> tuple[dict[str, Limit], tuple[str, ...]]:
    """What the ranges ask of each tensor, and notes. assigned: what a recipe gives, before it is protected."""
    bounds = measured_ranges(options, model)
    if bounds is None:
        path = _path(options)
        return {}, (_missing(path),) if path else ()
    return limits(assigned.assignments, bounds), ()


def measured_ranges(options: Options, model: Model) -> Bounds | None:
    """The ranges of --calibration; None without it or without clip_bounds.bin. Raises BadInput for ranges of another model."""
    path = _path(options)
    return _bounds(path, model) if path else None


def _path(options: Options) -> Path | None:
    return options.calibration / FILE_NAME if options.calibration and not options.stock else None


def _bounds(path: Path, model: Model) -> Bounds | None:
    """None when there is no file. Raises BadInput for a damaged one, or one of another model."""
    if not path.is_file():
        return None
    bounds = read_bounds(path)
    check_model_id(bounds.header, path, model_id_of(model), "the source")
    return bounds


def _missing(path: Path) -> str:
    return f"there is no {path}: no type was checked for overflow or super experts"
