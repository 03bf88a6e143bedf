"""How often each expert was seen, layer by layer: what an importance matrix of a mixture of experts is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.roles import layer_of

FEW = 64  # from here on, more tokens no longer change an expert's importance much (benchmarks/bench_importance.py)


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """Tokens that the experts of one layer saw. few: experts with fewer than FEW; unseen: with none."""

    layer: int
    n_experts: int
    fewest: int
    median: int
    few: int
    unseen: int


def coverage(counts: Mapping[str, NDArray[np.int64]]) -> tuple[LayerCoverage, ...]:
    """By layer. counts: of each weight, tokens by matrix; weights that are no routed experts do not matter."""
    found: dict[int, LayerCoverage] = {}
    for name, seen in counts.items():
        layer = layer_of(name)
        if layer is not None and "_exps." in name:
            few, unseen = int((seen < FEW).sum()), int((seen == 0).sum())
            found[layer] = LayerCoverage(layer, len(seen), int(seen.min()), int(np.median(seen)), few, unseen)
    return tuple(found[layer] for layer in sorted(found))


def is_reached(layers: tuple[LayerCoverage, ...], wanted: int) -> bool:
    """Whether every expert was seen `wanted` times; never in a model without experts, whose weights see every token anyhow."""
    return bool(layers) and all(layer.fewest >= wanted for layer in layers)
