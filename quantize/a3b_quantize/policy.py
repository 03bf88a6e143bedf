"""What `--type`, `--stock`, `--pure`, `--policy`, `--tensor-type` and `--group-size` mean together: a Policy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.ggml import NOT_WRITABLE, WRITABLE
from a3b_gguf.tensors import TYPES, GGMLType, Model
from a3b_quantize import recipe
from a3b_quantize.assign import Assignment, fit, roles
from a3b_quantize.decide import Assigned, decide, match
from a3b_quantize.file_types import ALIASES, FILE_TYPES, file_type, plain_number
from a3b_quantize.overrides import override_rules
from a3b_quantize.policy_file import Recipe
from a3b_quantize.rule import Rule
from a3b_quantize.stock import stock_assignments, why_protected

COPY = "copy"
# The model, whether there is an importance matrix, tensors that rules decide -> types of all others at least.
Base = Callable[[Model, bool, Collection[str]], tuple[Assignment, ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user asked for: the values of the flags, unread."""

    type_name: str | None
    stock: bool = False
    pure: bool = False
    policy: str | None = None
    tensor_types: tuple[str, ...] = ()
    group_sizes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Which type and group size each tensor gets, and why: ordered rules, and `base` for what no rule gives a type.

    name: what the file records under a3b.recipe; file_type: the number under general.file_type, None for that of most weights;
    file_type_name: its name in FILE_TYPES or, for one type throughout, the type's; overrides: the flags that come before its own rules.
    """

    name: str
    description: str
    file_type: int | None
    file_type_name: str
    rules: tuple[Rule, ...] = ()
    base: Base | None = None
    overrides: tuple[str, ...] = ()

    @property
    def copies(self) -> bool:
        """Whether tensors stay as they are where no flag says otherwise."""
        return self.name == COPY

    def assign(self, model: Model, has_importance: bool = False) -> Assigned:
        """Decides for all tensors of `model`, in its order. Raises UsageError for a rule that does nothing, BadInput for a tensor
        without a rule."""
        found = match(model, self.rules)
        base = self.base(model, has_importance, found.types) if self.base else ()
        return decide(model, self.rules, found, {each.name: each for each in base})

    def number(self, assignments: Collection[Assignment]) -> int:
        """What general.file_type says of a file with these tensors."""
        if self.file_type is not None:
            return self.file_type
        weights: dict[GGMLType, int] = {}
        for each in assignments:
            weights[each.type] = weights.get(each.type, 0) + each.n_weights
        return plain_number(max(weights, key=lambda kind: weights[kind])) if weights else 0


def find_policy(type_name: str, stock: bool = False, pure: bool = False) -> Policy:
    """The policy that `--type type_name` asks for. Raises UsageError that lists what there is and suggests the nearest name."""
    name = type_name.lower()
    if stock and pure:
        raise UsageError(
            "--pure and --stock do not go together", "--pure gives every matrix the type, --stock mixes as llama-quantize does"
        )
    if pure and name == COPY:
        raise UsageError("--type copy and --pure do not go together", "--type copy leaves every tensor as it is")
    if stock:
        chosen = file_type(name) if ALIASES.get(name, name) in FILE_TYPES else None
        if chosen is None:
            raise unknown_type(type_name, stock)
        description = f"llama-quantize's own choice for {chosen.name.upper()}"
        mixture: Base = lambda model, importance, manual: stock_assignments(model, chosen, importance, manual)  # noqa: E731
        return Policy(f"stock:{chosen.name}", description, chosen.number, chosen.name, base=mixture)
    if name == COPY:
        return Policy(COPY, "every tensor as it is", None, COPY, base=lambda model, *_: kept(model))
    if name in recipe.names() and not pure:
        return recipe_policy(recipe.load_recipe(name))
    if name in TYPES and name not in NOT_WRITABLE:
        kind = TYPES[name]
        description = f"every matrix {kind.name}; vectors, norms, router and conv as they are"
        return Policy(kind.name, description, plain_number(kind), kind.name, base=lambda model, *_: plain_assignments(model, kind))
    if pure and name in recipe.names():
        raise UsageError(f"--pure: {type_name!r} is a recipe, not a type", f"types: {', '.join(kind.name for kind in WRITABLE)}")
    raise unknown_type(type_name, stock)


def choose_policy(choice: Choice) -> Policy:
    """The policy that all flags together ask for: those for tensors first, then the policy file, then the type.

    Raises UsageError for what cannot be, BadInput for a bad policy file.
    """
    policy = _with_file(choice)
    flags = override_rules(choice.tensor_types, choice.group_sizes)
    if not flags:
        return policy
    return replace(policy, rules=(*flags, *policy.rules), overrides=tuple(rule.where.lstrip("-") for rule in flags))


def _with_file(choice: Choice) -> Policy:
    if choice.policy is None:
        if choice.type_name is None:
            raise UsageError("say what the tensors shall become: --type or --policy is missing", known_types())
        return find_policy(choice.type_name, choice.stock, choice.pure)
    own = recipe.load_policy(choice.policy)
    if choice.type_name is not None:
        base = find_policy(choice.type_name, choice.stock, choice.pure)
        if base.copies:
            raise UsageError("--type copy and --policy do not go together", "a rule with type keep leaves a tensor as it is")
        own = replace(own, name=f"{base.name}-{own.name}")
    elif choice.stock or choice.pure:
        raise UsageError("--stock and --pure say what --type means, and there is none", "add --type, or leave them out")
    elif own.base:
        base = find_policy(own.base)
    else:
        return recipe_policy(own)
    number, name = (FILE_TYPES[own.file_type].number, own.file_type) if own.file_type else (base.file_type, base.file_type_name)
    return replace(base, name=own.name, description=own.description, file_type=number, file_type_name=name, rules=(*own.rules, *base.rules))


def recipe_policy(ours: Recipe) -> Policy:
    """The policy that a recipe stands for, its base behind it."""
    number = FILE_TYPES[ours.file_type].number if ours.file_type else None
    base = recipe_policy(recipe.load_recipe(ours.base)) if ours.base else None
    rules = (*ours.rules, *(base.rules if base else ()))
    return Policy(ours.name, ours.description, number, ours.file_type, rules)


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


def kept(model: Model) -> tuple[Assignment, ...]:
    """Every tensor with the type that it has."""
    role = roles(model)
    return tuple(Assignment(each.name, each.shape, each.type, each.type, role[each.name], "as it is") for each in model.tensors)


def known_types() -> str:
    """What `--type` takes, for hints."""
    return f"recipes: {', '.join(recipe.names())}; types: {', '.join(kind.name for kind in WRITABLE)}; {COPY}"


def unknown_type(name: str, stock: bool) -> UsageError:
    """The error for a name that is none, with the nearest that is one."""
    writable = [kind.name for kind in WRITABLE]
    known = list(FILE_TYPES) + list(ALIASES) if stock else [*recipe.names(), *writable, COPY]
    listing = f"with --stock: {', '.join(FILE_TYPES)}" if stock else known_types()
    if stock and name.lower() == COPY:
        return UsageError("--type copy and --stock do not go together", "--type copy leaves every tensor as it is")
    if name.lower() in NOT_WRITABLE:
        return UsageError(f"--type: ggml computes with {name.lower()} but cannot write it", listing)
    if not stock and name.lower() in FILE_TYPES:
        return UsageError(f"--type: {name!r} is a mixture of llama-quantize, not a recipe of ours", f"add --stock; {listing}")
    near = get_close_matches(name.lower(), known, 1)
    return UsageError(f"--type: there is no {name!r}" + (f"; did you mean {near[0]}?" if near else ""), listing)
