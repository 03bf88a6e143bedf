"""What the ranges of `--calibration DIR` change in the types that a policy chose."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf.clip_bounds import FILE_NAME, check_model_id, read_bounds
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.model_id import model_id_of
from a3b_gguf.tensors import Model
from a3b_quantize.decide import Assigned, match
from a3b_quantize.fit_imatrix import listed
from a3b_quantize.overrides import override_rules
from a3b_quantize.protect import protected_types


def protected(assigned: Assigned, model: Model, options: Options) -> Assigned:
    """`assigned` with types that the ranges call for; a note says which tensors.

    Nothing changes with --stock, whose types are llama-quantize's, nor with --policy, nor for what --tensor-type names: there the ranges
    are only told. Raises BadInput for ranges of another model.
    """
    path = options.calibration / FILE_NAME if options.calibration else None
    if path is None or options.stock:
        return assigned
    if not path.is_file():
        return replace(assigned, notes=(*assigned.notes, f"there is no {path}: no type was checked for overflow or super experts"))
    bounds = read_bounds(path)
    check_model_id(bounds.header, path, model_id_of(model), "the source")
    named = match(model, override_rules(options.tensor_types, ())).types
    before = assigned.assignments
    safe = protected_types(before, bounds)
    fixed = [each.name for each, new in zip(before, safe, strict=True) if new.type != each.type and (options.policy or each.name in named)]
    after = tuple(each if each.name in fixed else new for each, new in zip(before, safe, strict=True))
    changed = [new for each, new in zip(before, after, strict=True) if new.type != each.type]
    notes = list(assigned.notes)
    if changed:
        first = changed[0]
        names = listed([each.name for each in changed])
        notes.append(f"measured ranges changed the type of {len(changed)} tensors ({names}); the first, {first.reason}")
    if fixed:
        notes.append(f"measured ranges speak against the type of {len(fixed)} tensors that you chose: {listed(fixed)}")
    return Assigned(after, tuple(notes))
