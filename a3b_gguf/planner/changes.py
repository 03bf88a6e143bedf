"""Changes of a wish, a machine or a model's file that may make a plan fit: each kind as a ladder from its mildest step to its hardest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.placement import HOST
from a3b_gguf.memory.settings import padded
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.place import best, closest, ignoring_hand
from a3b_gguf.planner.plan import UBATCHES
from a3b_gguf.tensors import TYPES
from a3b_gguf.units import MIB, human_bytes

LEAST_CTX = 2048
WEIGHT_TYPES = ("q4_k", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_xs")
MARGINS = (768 * MIB, 512 * MIB)  # below that, cards were seen to load and answer nothing
MORE_THAN_SHORT = (1.0, 1.02, 1.1, 1.5, 2.0, 4.0)  # what is missing may move to another memory when one grows


@dataclass(frozen=True, slots=True)
class Step:
    """A change that was made. draft: with it, nothing placed anew. given: bytes of room that it gives, beside what it saves."""

    text: str
    draft: Draft
    given: int = 0


Ladder = Callable[[Draft], Iterator[Step]]


def no_hand(draft: Draft) -> Iterator[Step]:
    """Placement by hand left to the planner."""
    if draft.wishes.by_hand:
        short = sum(budget.short for budget in closest(draft).budgets)
        yield Step("leave --n-gpu-layers and --n-cpu-moe to the planner", ignoring_hand(draft), short)


def own_batch(draft: Draft) -> Iterator[Step]:
    """The batch left to the planner, which begins with the smallest that is sensible."""
    rows, least = draft.settings.n_ubatch, max(draft.settings.n_outputs_max, min(512, draft.settings.n_ctx))
    if draft.wishes.n_ubatch is not None and rows > least:
        least = max(least, UBATCHES[0])
        wishes, settings = replace(draft.wishes, n_ubatch=least), replace(draft.settings, n_ubatch=least)
        yield Step(f"--ubatch {least}", replace(draft, wishes=wishes, settings=settings))


def fewer_checkpoints(draft: Draft) -> Iterator[Step]:
    if draft.wishes.checkpoint_bytes:
        wishes, settings = replace(draft.wishes, checkpoint_bytes=0), replace(draft.settings, checkpoint_bytes=0)
        yield Step("--checkpoints 0, at the price of reading a chat again in each turn", replace(draft, wishes=wishes, settings=settings))


def fewer_texts(draft: Draft) -> Iterator[Step]:
    if draft.wishes.text_bytes:
        wishes, settings = replace(draft.wishes, text_bytes=0), replace(draft.settings, text_bytes=0)
        text = "--keep-texts 0, at the price of reading a chat again when its slot was needed meanwhile"
        yield Step(text, replace(draft, wishes=wishes, settings=settings))


def no_drafts(draft: Draft) -> Iterator[Step]:
    if draft.wishes.n_draft:
        settings = replace(draft.settings, n_draft=0, load_mtp=False, n_outputs_max=draft.settings.n_seq_max)
        yield Step("--draft 0", replace(draft, wishes=replace(draft.wishes, n_draft=0), settings=settings))


def fewer_slots(draft: Draft) -> Iterator[Step]:
    own = draft.wishes.n_ctx_slot
    for slots in range(draft.settings.n_seq_max - 1, 0, -1):
        n_ctx = draft.settings.n_ctx if own is None else padded(own) * slots
        settings = replace(draft.settings, n_ctx=n_ctx, n_seq_max=slots, n_outputs_max=slots * (1 + draft.settings.n_draft))
        yield Step(f"--parallel {slots}", replace(draft, wishes=replace(draft.wishes, n_parallel=slots), settings=settings))


def small_cache(draft: Draft) -> Iterator[Step]:
    yield from cache(draft, "q8_0", "--kv-type q8_0")


def smallest_cache(draft: Draft) -> Iterator[Step]:
    yield from cache(draft, "q4_0", "--kv-type q4_0, which weakens long chains of thought and tool calls")


def cache(draft: Draft, name: str, text: str) -> Iterator[Step]:
    """Another type of KV cache, when it is smaller and possible."""
    now = TYPES[draft.settings.kv_type_k].bits_per_weight + TYPES[draft.settings.kv_type_v].bits_per_weight
    kind, facts = TYPES[name], draft.facts
    if 2 * kind.bits_per_weight < now and not facts.k_dim % kind.block and not facts.v_dim % kind.block and facts.n_attention:
        settings = replace(draft.settings, kv_type_k=name, kv_type_v=name)
        yield Step(text, replace(draft, wishes=replace(draft.wishes, kv_type=name), settings=settings))


def shorter_context(draft: Draft) -> Iterator[Step]:
    """The longest that fits; where none does, half of what was asked for."""
    found = longest_context(draft)
    if found is None and draft.settings.n_ctx >= 2 * LEAST_CTX:
        found = with_context(draft, draft.settings.n_ctx // 2 // 1024 * 1024)
    if found:
        own = found.wishes.n_ctx_slot
        yield Step(f"--ctx {found.settings.n_ctx}" if own is None else f"--ctx-per-slot {own}", found)


def longest_context(draft: Draft) -> Draft | None:
    """`draft` with the longest context that fits, a whole number of 1,024 tokens and shorter than the one asked for."""
    low, high = LEAST_CTX // 1024, draft.settings.n_ctx // 1024
    if draft.settings.n_ctx <= LEAST_CTX or not best(with_context(draft, LEAST_CTX)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if best(with_context(draft, 1024 * middle)) else (low, middle)
    return with_context(draft, 1024 * low)


def with_context(draft: Draft, n_ctx: int) -> Draft:
    """With `n_ctx` tokens of all slots together, rounded up as llama.cpp does."""
    wishes, slots = draft.wishes, draft.settings.n_seq_max
    split = slots if wishes.kv_split or wishes.n_ctx_slot is not None else 1
    each = padded(-(-n_ctx // split))
    wishes = replace(wishes, n_ctx=each * split) if wishes.n_ctx_slot is None else replace(wishes, n_ctx_slot=each)
    settings = replace(draft.settings, n_ctx=each * split, n_ubatch=min(draft.settings.n_ubatch, each * split))
    return replace(draft, wishes=wishes, settings=settings)


def less_margin(draft: Draft) -> Iterator[Step]:
    for margin in MARGINS if draft.machine.gpus else ():
        if margin < draft.wishes.margin:
            text = f"--margin {margin // MIB}MiB, at the risk of failing at the first long prompt"
            given = len(draft.machine.gpus) * (draft.wishes.margin - margin)
            yield Step(text, replace(draft, wishes=replace(draft.wishes, margin=margin)), given)


def no_vision(draft: Draft) -> Iterator[Step]:
    if draft.facts.projector:
        yield Step("leave --mmproj out, and images with it", replace(draft, facts=replace(draft.facts, projector=None)))


def smaller_weights(draft: Draft) -> Iterator[Step]:
    """Another quantization, its size estimated from the weights of the routed experts (of all matrices in a dense model)."""
    for name in WEIGHT_TYPES:
        facts = quantized(draft.facts, TYPES[name].bits_per_weight)
        if facts.weight_bytes < draft.facts.weight_bytes:
            what = "experts" if facts.n_expert else "weights"
            how = f"a3b quantize ... --tensor-type {'_exps' if facts.n_expert else 'weight'}={name}"
            text = f"a smaller quantization: {what} in {name}, about {human_bytes(facts.weight_bytes)} in all, {how}"
            yield Step(text, replace(draft, facts=facts))


def more_memory(draft: Draft) -> Iterator[Step]:
    """What is missing of each memory that lacks some, in whole MiB."""
    short = {budget.device: budget.short for budget in closest(draft).budgets if budget.short}
    for share in MORE_THAN_SHORT if short else ():
        added = {device: -(-int(n_bytes * share) // MIB) * MIB for device, n_bytes in short.items()}
        ram, machine = added.get(HOST, 0), draft.machine
        gpus = tuple(replace(gpu, total=gpu.total + added.get(gpu.name, 0), free=gpu.free + added.get(gpu.name, 0)) for gpu in machine.gpus)
        machine = replace(machine, ram_total=machine.ram_total + ram, ram_available=machine.ram_available + ram, gpus=gpus)
        names = ["RAM" if device == HOST else f"memory on {device}" for device in added]
        yield Step(f"more {' and '.join(names)}", replace(draft, machine=machine), sum(added.values()))


# From what costs a user least to what costs most: a flag, length, safety, images, another file, quality, hardware.
LADDERS: tuple[Ladder, ...] = (
    no_hand, own_batch, no_drafts, fewer_texts, fewer_checkpoints, fewer_slots, small_cache, shorter_context, less_margin, no_vision,
    smaller_weights, smallest_cache, more_memory,
)  # fmt: skip


def quantized(facts: Facts, bits: float) -> Facts:
    """`facts` with the routed experts, or the matrices of a dense model, at `bits` a weight where they have more."""

    def ratio(n_bytes: int, n_weights: int) -> float:
        return min(1.0, bits * n_weights / (8 * n_bytes)) if n_bytes else 1.0

    def smaller(layer: Layer) -> Layer:
        if not facts.n_expert:
            by = ratio(layer.dense, layer.dense_weights)
            matrices = tuple((name, int(n_bytes * by)) for name, n_bytes in layer.dense_tensors)
            return replace(layer, dense=int(layer.dense * by), dense_tensors=matrices, repacked=int(layer.repacked * by))
        by = ratio(layer.experts, layer.expert_weights)
        return replace(layer, expert_tensors=tuple((name, int(n_bytes * by)) for name, n_bytes in layer.expert_tensors))

    return replace(facts, layers=tuple(smaller(layer) for layer in facts.layers))
