"""Where activations are measured: which nodes of llama.cpp's graph are which site of clip_bounds.bin.

Beside the sites there is SHARED_DOWN_IN, in memory alone: files count the shared expert as one more expert of down_in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import ALL_EXPERTS, SHARED_DOWN_IN, SITES, Record
from a3b_gguf.llama.site_names import DENSE_NODES, LAST_WINS, NODE, site_of
from a3b_gguf.llama.watch import Node
from a3b_gguf.roles import layer_of, recurrent_layers
from a3b_quantize.bounds import record
from a3b_quantize.histogram import Histogram

BY_EXPERT = ("down_in", "down_out")

Ranges = Mapping[tuple[int, str], Histogram]


class Sites:
    """Observer. Owns a histogram for each (layer, site) that was seen, with one part for each expert where the site has experts.

    n_experts: by layer, of layers that have routed experts; last: the node behind which nothing is measured.
    """

    def __init__(self, tensor_names: Iterable[str], n_experts: Mapping[int, int]) -> None:
        self.recurrent = recurrent_layers(tensor_names)
        self.n_experts = n_experts
        self.histograms: dict[tuple[int, str], Histogram] = {}
        self._last: dict[tuple[int, str], NDArray[np.float32]] = {}
        self._experts: dict[int, NDArray[np.int32]] = {}

    def begin(self) -> None:
        self._last.clear()
        self._experts.clear()

    def site(self, node: str) -> tuple[int, str] | None:
        """Layer and site (or TOPK) of a node, None when it is of no interest."""
        match = NODE.fullmatch(node)
        if match and int(match[2]) in self.n_experts and DENSE_NODES.get(match[1]) == "down_in":
            return int(match[2]), SHARED_DOWN_IN  # beside routed experts, the nodes of a dense FFN are the shared expert's
        return site_of(node, self.recurrent, self.n_experts)

    def wants(self, node: Node) -> bool:
        return self.site(node.name) is not None

    def receive(self, node: Node) -> bool:
        found, values = self.site(node.name), node.values()
        if found is None or values is None:
            return True
        layer, site = found
        if values.dtype == np.int32:
            self._experts[layer] = values.reshape(-1)
        elif site in LAST_WINS:
            self._last[found] = values
        elif site in BY_EXPERT and layer in self._experts:
            # [tokens, experts used, channels], or without tokens when there is one
            self._of(found, self.n_experts[layer]).add(values, self._experts[layer])
        else:
            self._of(found).add(values)
        if site == "residual":
            self._flush(layer)
        return True

    def _of(self, site: tuple[int, str], owners: int = 1) -> Histogram:
        if site not in self.histograms:
            self.histograms[site] = Histogram(owners)
        return self.histograms[site]

    def _flush(self, layer: int) -> None:
        """The layer is through: what it left last under a name that wins late is final."""
        for site in LAST_WINS:
            if (layer, site) in self._last:
                self._of((layer, site)).add(self._last.pop((layer, site)))


def experts_by_layer(shapes: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """How many routed experts each layer has, told from the shapes of the tensors, row-major."""
    found: dict[int, int] = {}
    for name, shape in shapes.items():
        layer = layer_of(name)
        if "_exps." in name and layer is not None and len(shape) == 3:
            found[layer] = shape[0]
    return found


def records(ranges: Ranges) -> tuple[Record, ...]:
    """Everything seen, by layer, site and expert."""
    found: list[Record] = []
    for layer, site in sorted((key for key in ranges if key[1] != SHARED_DOWN_IN), key=lambda key: (key[0], SITES.index(key[1]))):
        seen = ranges[layer, site]
        found.append(record(layer, site, ALL_EXPERTS, seen))
        if len(seen.counts) > 1:
            found += [record(layer, site, owner, seen.part(owner)) for owner in seen.owners()]
        if site == "down_in" and (layer, SHARED_DOWN_IN) in ranges:
            found.append(record(layer, site, len(seen.counts), ranges[layer, SHARED_DOWN_IN]))
    return tuple(found)
