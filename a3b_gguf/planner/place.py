"""The search for a placement: the fewest expert layers in RAM that leave every GPU its margin, then the fewest whole layers."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.draft import Draft


def best(draft: Draft) -> Draft | None:
    """The placement that keeps most on the GPUs and fits everywhere, wishes by hand obeyed; None when there is none."""
    found = closest(draft)
    return found if found.fits else None


def closest(draft: Draft) -> Draft:
    """The same search with RAM taken as boundless: fits, or shows what is missing."""
    for n_gpu_layers in layer_counts(draft):
        found = with_experts(draft.arranged(n_gpu_layers))
        if all(not budget.short for budget in found.budgets if budget.device != HOST):
            return found
    return found


def layer_counts(draft: Draft) -> list[int]:
    """Values of n_gpu_layers to try, best first; the one asked for alone when there is one.

    With --n-cpu-moe by hand the layers themselves stay on the GPU, as users of llama.cpp expect.
    """
    most = draft.facts.n_layer_all + 1
    if not draft.machine.gpus:
        return [0]
    if draft.wishes.n_gpu_layers is not None:
        return [min(draft.wishes.n_gpu_layers, most)]
    if draft.wishes.n_cpu_moe is not None and draft.facts.n_expert:
        return [most]
    # llama.cpp puts the last layers on the GPU; counts that would move only MTP blocks, which are not loaded, change nothing.
    skipped = len(draft.facts.nextn)
    return [n for n in range(most, -1, -1) if n == 0 or n > skipped]


def with_experts(draft: Draft) -> Draft:
    """Experts placed: as many layers as asked, else the fewest of each GPU, counted from its first layer like --n-cpu-moe does."""
    facts, placement = draft.facts, draft.placement
    if draft.wishes.n_cpu_moe is not None:
        return rearranged(draft, tuple(range(min(draft.wishes.n_cpu_moe, facts.n_layer))))
    moved: tuple[int, ...] = ()
    # The first GPU last: it stages experts for all of them, so it must know whether any are in RAM.
    for gpu in reversed(draft.machine.gpus):
        layers = [i for i in placement.layers_on(gpu.name) if i < facts.n_layer and facts.layers[i].experts]
        for count in range(len(layers) + 1):
            trial = rearranged(draft, (*moved, *layers[:count]))
            if not any(budget.short for budget in trial.budgets if budget.device == gpu.name):
                break
        moved = (*moved, *layers[:count])
    return rearranged(draft, moved)


def rearranged(draft: Draft, cpu_experts: tuple[int, ...]) -> Draft:
    return draft.arranged(draft.placement.n_gpu_layers, cpu_experts)


def ignoring_hand(draft: Draft) -> Draft:
    """The same draft without placements by hand: what the planner would have done."""
    return replace(draft, wishes=replace(draft.wishes, n_gpu_layers=None, n_cpu_moe=None))


def on_gpu(draft: Draft) -> tuple[int, int]:
    """How good a placement is: whole layers on GPUs, then layers whose experts are there too."""
    layers = [i for i in range(draft.facts.n_layer) if draft.placement.layers[i] != HOST]
    return len(layers), sum(1 for i in layers if draft.placement.expert_device(i) != HOST)
