"""The rule that places layers, experts and batch together, and its reasons."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.place import best, ignoring_hand, on_gpu
from a3b_gguf.planner.refuse import NoRoom
from a3b_gguf.planner.speed import in_ram
from a3b_gguf.units import human_bytes

LARGE_UBATCHES = (2048, 1024)


def placement(draft: Draft) -> Draft:
    """Where layers and experts go. Raises NoRoom when nothing fits."""
    found = fastest(draft)
    by_hand = draft.wishes.by_hand
    if not found and by_hand:  # obeyed as long as it fits at all: the margin is then the user's
        found = best(replace(draft, wishes=replace(draft.wishes, margin=0)))
        if found:
            found = replace(found, wishes=draft.wishes)
            tight = min((budget for budget in found.budgets if budget.device != HOST), key=lambda budget: budget.left)
            found = found.warn(f"{tight.device}: only {human_bytes(tight.left)} stay free; loads like this often fail at the first request")
    if not found:
        raise NoRoom(draft)
    if draft.wishes.n_cpu_moe and not draft.facts.n_expert:
        found = found.warn("--n-cpu-moe: this model has no routed experts, the flag changes nothing")
    if by_hand and (ideal := fastest(ignoring_hand(draft))):
        found = compared(found, ideal)
    return explained(found, by_hand)


def fastest(draft: Draft) -> Draft | None:
    """The best placement, and where experts must be copied from RAM the batch whose gain outweighs the experts that it pushes out."""
    found = best(draft)
    if not found or draft.wishes.n_ubatch is not None or not (found.placement.uses_gpu and found.placement.has_overrides):
        return found
    for larger in LARGE_UBATCHES:
        if found.settings.n_ubatch < larger <= draft.settings.n_ctx:
            trial = best(replace(draft, settings=replace(draft.settings, n_ubatch=larger)))
            if trial and on_gpu(trial)[0] == on_gpu(found)[0] and trial.speed.turn_seconds < found.speed.turn_seconds:
                return trial
    return found


def compared(found: Draft, ideal: Draft) -> Draft:
    """A warning where the planner would have done better than the hand, or filled the GPU less."""
    if on_gpu(ideal) > on_gpu(found):
        layers, n_bytes = on_gpu(ideal)
        text = f"{layers} layers with {human_bytes(n_bytes)} of experts would fit and be faster"
        return found.warn(f"by hand less is on the GPU than fits: {text}")
    return found


def explained(draft: Draft, by_hand: bool) -> Draft:
    """The reasons for a placement that is already made."""
    facts, here = draft.facts, draft.placement
    if not here.uses_gpu:
        asked = "--n-gpu-layers 0 was asked for" if draft.wishes.n_gpu_layers == 0 and draft.machine.gpus else ""
        why = asked or ("the GPU has no room for a single layer" if draft.machine.gpus else "there is no GPU")
        return draft.because("layers on GPU", "none", why)
    fit = "all of them fit" + (", apart from experts" if here.has_overrides else "")
    why = fit if here.n_gpu_layers > facts.n_layer_all else "no more fit; the rest stays in RAM"
    value = f"{on_gpu(draft)[0]} of {facts.n_layer}" + ("" if here.output == HOST else " and the output")
    draft = draft.because("layers on GPU", value, why if draft.wishes.n_gpu_layers is None else "asked for")
    if here.tensor_split:
        shares = ", ".join(f"{n} to {gpu.name}" for n, gpu in zip(here.tensor_split, draft.machine.gpus, strict=True))
        draft = draft.because("split", ",".join(map(str, here.tensor_split)), f"layers by the room that each GPU has: {shares}")
    return experts(draft, by_hand) if facts.n_expert else draft


def experts(draft: Draft, by_hand: bool) -> Draft:
    """Why these experts are in RAM."""
    facts, here = draft.facts, draft.placement
    if not here.has_overrides:
        return draft.because("experts in RAM", "none", "asked for" if by_hand else "the experts of these layers fit onto the GPU")
    held = sum(in_ram(facts, here, i) for i in range(facts.n_layer) if here.layers[i] != HOST)
    used = f"{facts.n_expert_used} of {facts.n_expert} experts"
    why = "asked for" if draft.wishes.n_cpu_moe is not None else "the fewest bytes that leave the margin free"
    why += f"; of their {human_bytes(held)} a token reads only {used}"
    return draft.because("experts in RAM", value_of(draft), why)


def value_of(draft: Draft) -> str:
    """ "12 layers (0-11) and of layer 12 down" """
    here = draft.placement
    whole = f"{len(here.cpu_experts)} layers ({spans(here.cpu_experts)})" if here.cpu_experts else ""
    part = ", ".join(f"of layer {i} {names(draft, i)}" for i in sorted({layer for layer, _ in here.cpu_tensors}))
    return " and ".join(text for text in (whole, part) if text)


def names(draft: Draft, layer: int) -> str:
    """ "gate and down" """
    found = [name.removeprefix("ffn_").removesuffix("_exps") for i, name in draft.placement.cpu_tensors if i == layer]
    return " and ".join(found)


def spans(layers: tuple[int, ...]) -> str:
    """ "0-23, 40-41" """
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
