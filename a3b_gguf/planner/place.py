"""The search for a placement: the fewest expert bytes in RAM that leave every GPU its margin and RAM its reserve, then the fewest
whole layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

from a3b_gguf.memory.cache import kv_row_bytes
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.plan import Budget

MOST_SHIFTED = 3  # GPUs among which borders are shifted by a layer to fill them better
FIXED = ("compute buffer", "driver context", "f16 copy of one layer's cache", "vision encoder", "vision encoder's buffer")


def best(draft: Draft) -> Draft | None:
    """The placement that keeps most on the GPUs and fits everywhere, wishes by hand obeyed; None when there is none."""
    found = closest(draft)
    return found if found.fits else None


def closest(draft: Draft) -> Draft:
    """The best placement that fits, or the one that lacks least of what nothing can replace: RAM when a GPU is filled, else the GPU."""
    counts = layer_counts(draft)
    low, high = 0, 0 if fits_gpus(with_experts(draft, counts[0]).budgets) else len(counts) - 1  # most often all layers fit
    while low < high:  # fewer layers always take less of the GPUs
        middle = (low + high) // 2
        low, high = (low, middle) if fits_gpus(with_experts(draft, counts[middle]).budgets) else (middle + 1, high)
    nearest = with_experts(draft, counts[low], shifted=True)
    if nearest.fits:
        return nearest
    ram, *rest = nearest.budgets
    spare = sum(max(0, budget.room) for budget in rest)  # all that a better filling of the GPUs could take from RAM
    for count in counts[low + 1 :] if ram.short <= spare else counts[low + 1 :][-1:]:
        found = with_experts(draft, count)
        if found.fits:
            return found
        nearest = min(nearest, found, key=lambda trial: sum(budget.short for budget in trial.budgets))
    return nearest


def fits_gpus(found: Sequence[Budget]) -> bool:
    return not any(budget.short for budget in found if budget.device != HOST)


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


def with_experts(draft: Draft, n_gpu_layers: int, shifted: bool = False) -> Draft:
    """The best arrangement of so many layers. shifted: several GPUs may take a layer more or less than their share, which fills them
    better and takes time."""
    if len(draft.machine.gpus) < 2 or n_gpu_layers == 0:
        return filled(draft.arranged(n_gpu_layers))
    split = shares(draft, n_gpu_layers)
    found = filled(draft.arranged(n_gpu_layers, split))
    if shifted and len(split) <= MOST_SHIFTED:
        trials = [filled(draft.arranged(n_gpu_layers, other)) for other in neighbours(split)]
        found = max((found, *trials), key=merit)
    return found


def merit(draft: Draft) -> tuple[bool, bool, int, int]:
    """Fits everywhere, fits the GPUs, keeps most experts there, leaves most on the fullest."""
    found = draft.budgets
    fits = not any(budget.short for budget in found)
    return fits, fits_gpus(found), on_gpu(draft)[1], min(budget.left for budget in found if budget.device != HOST)


def neighbours(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The splits in which one border lies one layer further."""
    for i in range(len(split) - 1):
        for by in (-1, 1):
            other = (*split[:i], split[i] + by, split[i + 1] - by, *split[i + 2 :])
            if min(other) >= 0:
                yield other


def shares(draft: Draft, n_gpu_layers: int) -> tuple[int, ...]:
    """Layers of each GPU, the output counted as one: bytes in proportion to the room that buffers leave there."""
    facts, active = draft.facts, min(n_gpu_layers, draft.facts.n_layer_all + 1)
    costs = [unit_bytes(draft, layer) for layer in (*facts.layers, *facts.nextn)] + [facts.output_bytes or facts.embedding_bytes]
    costs = costs[len(costs) - active :]
    fixed = [(term.device, term.n_bytes) for term in draft.arranged(n_gpu_layers).terms if term.name in FIXED]
    taken = [sum(n_bytes for device, n_bytes in fixed if device == gpu.name) for gpu in draft.machine.gpus]
    rooms = [max(1, gpu.free - draft.wishes.margin - taken[i]) for i, gpu in enumerate(draft.machine.gpus)]
    borders = [0, *cut(costs, rooms), active]
    return tuple(b - a for a, b in pairwise(borders))


def unit_bytes(draft: Draft, layer: Layer) -> int:
    """What one layer takes on its GPU, experts and cache included."""
    facts, settings = draft.facts, draft.settings
    state = 4 * (facts.conv_state + facts.ssm_state) * settings.n_states if layer.recurrent else 0
    return layer.n_bytes + state + kv_row_bytes(facts, layer.n_head_kv, settings) * settings.n_ctx


def cut(costs: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Borders between consecutive GPUs, such that the costs of each are to its room as all costs are to all room."""
    ends, total, room = list(accumulate(costs)), sum(costs), sum(rooms)
    return [sum(1 for end in ends if end * room <= part * total) for part in list(accumulate(rooms))[:-1]]


def filled(draft: Draft) -> Draft:
    """Experts placed: as many layers as asked in RAM, else the fewest bytes that leave each GPU its margin.

    What stays in RAM is counted from each GPU's first layer, as --n-cpu-moe does, and of one more layer single tensors.
    """
    facts, layers = draft.facts, draft.facts.layers
    if draft.wishes.n_cpu_moe is not None:
        return draft.with_cpu_experts(tuple(i for i in range(min(draft.wishes.n_cpu_moe, facts.n_layer)) if layers[i].experts))
    if draft.settings.load_mtp:
        layers = (*layers, *facts.nextn)
    movable = tuple(i for i, layer in enumerate(layers) if layer.experts and draft.placement.layers[i] != HOST)
    if not movable or fits_gpus(draft.budgets):
        return draft
    # Everything out first: buffers that come with any expert in RAM are then counted, whatever goes back.
    emptied = draft.with_cpu_experts(movable)
    whole: list[int] = []
    parts: list[tuple[int, str]] = []
    for budget in emptied.budgets[1:]:
        here = [i for i in movable if draft.placement.layers[i] == budget.device]
        kept, tensors = put_back(here, layers, budget)
        whole += kept
        parts += tensors
    return emptied.with_cpu_experts(tuple(whole), tuple(parts))


def put_back(movable: Sequence[int], layers: Sequence[Layer], budget: Budget) -> tuple[list[int], list[tuple[int, str]]]:
    """Which experts stay in RAM when one GPU, that has none yet, takes as many layers from the last as it has room for.

    Returns whole layers, and (layer, tensor) of the layer that goes onto the GPU in part.
    """
    room, kept = max(0, budget.room), list(movable)
    while kept and layers[kept[-1]].experts <= room:
        room -= layers[kept.pop()].experts
    if not kept:
        return [], []
    tensors = layers[kept[-1]].expert_tensors
    fitting = [some for n in range(1, len(tensors)) for some in combinations(tensors, n) if sum(size for _, size in some) <= room]
    if not fitting:
        return kept, []
    last, on_gpu_too = kept.pop(), max(fitting, key=lambda some: sum(size for _, size in some))
    return kept, [(last, name) for name, size in tensors if (name, size) not in on_gpu_too]


def ignoring_hand(draft: Draft) -> Draft:
    """The same draft without placements by hand: what the planner would have done."""
    return replace(draft, wishes=replace(draft.wishes, n_gpu_layers=None, n_cpu_moe=None))


def on_gpu(draft: Draft) -> tuple[int, int]:
    """How good a draft's placement is: see `on_gpu_of`."""
    return on_gpu_of(draft.facts, draft.placement)


def on_gpu_of(facts: Facts, placement: Placement) -> tuple[int, int]:
    """Whole layers on GPUs, then bytes of their experts that are there too."""
    layers = [i for i in range(facts.n_layer) if placement.layers[i] != HOST]
    tensors = ((i, name, n) for i in layers for name, n in facts.layers[i].expert_tensors)
    return len(layers), sum(n for i, name, n in tensors if placement.expert_device(i, name) != HOST)
