"""What `--type` and `--stock` mean: one of our recipes, llama-quantize's own choice, or one ggml type for every matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.ggml import NOT_WRITABLE, WRITABLE
from a3b_gguf.tensors import TYPES, GGMLType, Model
from a3b_quantize import recipe
from a3b_quantize.assign import Assignment, fit, roles
from a3b_quantize.file_types import ALIASES, FILE_TYPES, file_type, plain_number
from a3b_quantize.stock import stock_assignments, why_protected


@dataclass(frozen=True, slots=True)
class Policy:
    """Which type each tensor gets, and why.

    name: what the file records under a3b.recipe; file_type: the number under general.file_type; file_type_name: its name in
    FILE_TYPES or, for one type throughout, the type's; assign: decides for all tensors of a model, in its order.
    """

    name: str
    description: str
    file_type: int
    file_type_name: str
    assign: Callable[[Model], tuple[Assignment, ...]]


def find_policy(type_name: str, stock: bool = False) -> Policy:
    """The policy that `--type type_name` asks for. Raises UsageError that lists what there is and suggests the nearest name."""
    name = type_name.lower()
    if stock:
        chosen = file_type(name) if ALIASES.get(name, name) in FILE_TYPES else None
        if chosen is None:
            raise unknown_type(type_name, stock)
        description = f"llama-quantize's own choice for {chosen.name.upper()}"
        return Policy(f"stock:{chosen.name}", description, chosen.number, chosen.name, lambda model: stock_assignments(model, chosen))
    if name in recipe.names():
        ours = recipe.load_recipe(name)
        return Policy(
            ours.name,
            ours.description,
            FILE_TYPES[ours.file_type].number,
            ours.file_type,
            lambda model: recipe.recipe_assignments(model, ours),
        )
    if name in TYPES and name not in NOT_WRITABLE:
        kind = TYPES[name]
        description = f"every matrix {kind.name}; vectors, norms, router and conv as they are"
        return Policy(kind.name, description, plain_number(kind), kind.name, lambda model: plain_assignments(model, kind))
    raise unknown_type(type_name, stock)


def plain_assignments(model: Model, kind: GGMLType) -> tuple[Assignment, ...]:
    """`kind` for every tensor that llama-quantize would touch, as its --pure does; the others keep their type."""
    role = roles(model)
    result = []
    for tensor in model.tensors:
        protected = why_protected(tensor.name, tensor.shape)
        chosen, reason, fell_back = tensor.type, protected, False
        if not protected:
            chosen, reason, fell_back = fit(kind, tensor.shape[-1], f"every matrix {kind.name}")
        result.append(Assignment(tensor.name, tensor.shape, tensor.type, chosen, role[tensor.name], reason, fell_back))
    return tuple(result)


def unknown_type(name: str, stock: bool) -> UsageError:
    """The error for a name that is none, with the nearest that is one."""
    writable = [kind.name for kind in WRITABLE]
    known = list(FILE_TYPES) + list(ALIASES) if stock else [*recipe.names(), *writable]
    listing = f"with --stock: {', '.join(FILE_TYPES)}" if stock else f"recipes: {', '.join(recipe.names())}; types: {', '.join(writable)}"
    if name.lower() in NOT_WRITABLE:
        return UsageError(f"--type: ggml computes with {name.lower()} but cannot write it", listing)
    if not stock and name.lower() in FILE_TYPES:
        return UsageError(f"--type: {name!r} is a mixture of llama-quantize, not a recipe of ours", f"add --stock; {listing}")
    near = get_close_matches(name.lower(), known, 1)
    return UsageError(f"--type: there is no {name!r}" + (f"; did you mean {near[0]}?" if near else ""), listing)
