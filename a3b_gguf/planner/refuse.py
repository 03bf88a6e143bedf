"""A wish that cannot be: what it needs, what there is, and the cheapest changes that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from a3b_gguf.errors import AnswerIsNo
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.placement import HOST
from a3b_gguf.memory.settings import padded
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.place import best, closest, ignoring_hand
from a3b_gguf.planner.plan import Budget
from a3b_gguf.tensors import TYPES
from a3b_gguf.units import MIB, human_bytes

N_CHANGES = 3
LEAST_CTX = 2048
WEIGHT_TYPES = ("q4_k", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_xs")
MARGINS = (768 * MIB, 512 * MIB)  # below that, cards were seen to load and answer nothing


@dataclass(frozen=True, slots=True)
class Change:
    """Something that alone would make it fit, and the bytes that it frees or adds."""

    text: str
    n_bytes: int


def refusal(draft: Draft) -> AnswerIsNo:
    """The error for a draft that fits nowhere. Its hint lists the changes, cheapest for the user first."""
    near = closest(draft)
    missing = "; ".join(shortage(budget) for budget in near.budgets if budget.short)
    changes = "; or ".join(f"{change.text} ({human_bytes(change.n_bytes)})" for change in changes_for(draft, near))
    return AnswerIsNo(f"{draft.facts.name} does not fit: {missing}", changes)


def shortage(budget: Budget) -> str:
    usable = max(0, budget.available - budget.reserve)
    what = "reserve" if budget.device == HOST else "margin"
    return (
        f"{budget.device} needs {human_bytes(budget.need)} and has {human_bytes(usable)} "
        f"({human_bytes(budget.total)}, {human_bytes(budget.total - budget.available)} in use, {human_bytes(budget.reserve)} {what})"
    )


def changes_for(draft: Draft, near: Draft) -> list[Change]:
    """The first N_CHANGES that work."""
    offered = (change for propose in CHANGES for change in islice(propose(draft, near), 1))
    return list(islice(offered, N_CHANGES))


def no_hand(draft: Draft, near: Draft) -> Iterator[Change]:
    """Placement by hand left to the planner."""
    free = ignoring_hand(draft)
    if free.wishes != draft.wishes and best(free):
        yield Change("leave --n-gpu-layers and --n-cpu-moe to the planner", sum(budget.short for budget in near.budgets))


def fewer_slots(draft: Draft, near: Draft) -> Iterator[Change]:
    for slots in range(draft.settings.n_seq_max - 1, 0, -1):
        trial = replace(draft, settings=replace(draft.settings, n_seq_max=slots, n_outputs_max=slots * (1 + draft.settings.n_draft)))
        if found := best(trial):
            yield saving(f"--parallel {slots}", near, found)


def small_cache(draft: Draft, near: Draft) -> Iterator[Change]:
    if found := with_cache(draft, "q8_0"):
        yield saving("--kv-type q8_0", near, found)


def smallest_cache(draft: Draft, near: Draft) -> Iterator[Change]:
    if found := with_cache(draft, "q4_0"):
        yield saving("--kv-type q4_0, which weakens long chains of thought and tool calls", near, found)


def with_cache(draft: Draft, name: str) -> Draft | None:
    """The placement with another KV cache, when it is smaller, possible, and fits."""
    now = TYPES[draft.settings.kv_type_k].bits_per_weight + TYPES[draft.settings.kv_type_v].bits_per_weight
    kind, facts = TYPES[name], draft.facts
    if 2 * kind.bits_per_weight >= now or facts.k_dim % kind.block or facts.v_dim % kind.block:
        return None
    return best(replace(draft, settings=replace(draft.settings, kv_type_k=name, kv_type_v=name)))


def shorter_context(draft: Draft, near: Draft) -> Iterator[Change]:
    """The longest context that fits."""
    if found := longest_context(draft):
        yield saving(f"--ctx {found.settings.n_ctx}", near, found)


def longest_context(draft: Draft) -> Draft | None:
    """The placement with the longest context that fits, a whole number of 1,024 tokens and shorter than the one asked for."""

    def fitting(n_ctx: int) -> Draft | None:
        return best(replace(draft, settings=replace(draft.settings, n_ctx=padded(n_ctx))))

    low, high = LEAST_CTX // 1024, draft.settings.n_ctx // 1024
    if draft.settings.n_ctx <= LEAST_CTX or not fitting(1024 * low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(1024 * middle) else (low, middle)
    return fitting(1024 * low)


def less_margin(draft: Draft, near: Draft) -> Iterator[Change]:
    for margin in MARGINS:
        if margin < draft.wishes.margin and draft.machine.gpus and best(replace(draft, wishes=replace(draft.wishes, margin=margin))):
            yield Change(f"--margin {margin // MIB}MiB, at the risk of failing at the first long prompt", draft.wishes.margin - margin)


def smaller_weights(draft: Draft, near: Draft) -> Iterator[Change]:
    """Another quantization, its size estimated from the weights of the routed experts (of all matrices in a dense model)."""
    for name in WEIGHT_TYPES:
        facts = quantized(draft.facts, TYPES[name].bits_per_weight)
        if facts.weight_bytes < draft.facts.weight_bytes and best(replace(draft, facts=facts)):
            what = "experts" if facts.n_expert else "weights"
            saved = draft.facts.weight_bytes - facts.weight_bytes
            how = f"a3b quantize ... --tensor-type {'_exps' if facts.n_expert else 'weight'}={name}"
            yield Change(f"a smaller quantization: {what} in {name}, about {human_bytes(facts.weight_bytes)} in all ({how})", saved)


def more_memory(draft: Draft, near: Draft) -> Iterator[Change]:
    short = max(near.budgets, key=lambda budget: budget.short)
    yield Change(f"more {'RAM' if short.device == HOST else 'memory on ' + short.device}", short.short)


Proposal = Callable[[Draft, Draft], Iterator[Change]]
# From what costs a user least to what costs most: a flag, length, safety, another file, quality, hardware.
CHANGES: tuple[Proposal, ...] = (
    no_hand, fewer_slots, small_cache, shorter_context, less_margin, smaller_weights, smallest_cache, more_memory,
)  # fmt: skip


def saving(text: str, near: Draft, found: Draft) -> Change:
    return Change(text, max(0, near.n_bytes - found.n_bytes))


def quantized(facts: Facts, bits: float) -> Facts:
    """`facts` with the routed experts, or the matrices of a dense model, at `bits` a weight where they have more."""

    def ratio(n_bytes: int, n_weights: int) -> float:
        return min(1.0, bits * n_weights / (8 * n_bytes)) if n_bytes else 1.0

    def smaller(layer: Layer) -> Layer:
        if not facts.n_expert:
            return replace(layer, dense=int(layer.dense * ratio(layer.dense, layer.dense_weights)))
        by = ratio(layer.experts, layer.expert_weights)
        return replace(layer, expert_tensors=tuple((name, int(n_bytes * by)) for name, n_bytes in layer.expert_tensors))

    return replace(facts, layers=tuple(smaller(layer) for layer in facts.layers))
