"""Where the layers of a model live: the split that llama.cpp makes of its own accord, and the layers whose experts stay in RAM."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from a3b_gguf.machine import Device

HOST = "RAM"


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each block, MTP blocks at the end, and of the output. n_gpu_layers: as llama.cpp counts, the output being one.

    cpu_experts: blocks on a GPU whose routed experts stay in RAM all the same.
    """

    layers: tuple[str, ...]
    output: str
    n_gpu_layers: int
    cpu_experts: tuple[int, ...] = ()

    @property
    def uses_gpu(self) -> bool:
        return self.n_gpu_layers > 0 and (self.output != HOST or any(device != HOST for device in self.layers))

    def layers_on(self, device: str) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.layers) if name == device)

    def expert_device(self, layer: int) -> str:
        return HOST if layer in self.cpu_experts else self.layers[layer]

    def with_cpu_experts(self, layers: Sequence[int]) -> Placement:
        """The same split with the experts of `layers` in RAM; layers that are there anyway need no mention."""
        return replace(self, cpu_experts=tuple(sorted(i for i in set(layers) if i < len(self.layers) and self.layers[i] != HOST)))


def place(n_layer_all: int, gpus: Sequence[Device], n_gpu_layers: int) -> Placement:
    """The last `n_gpu_layers` of blocks and output on the GPUs, split in proportion to their free memory.

    Source: llama_model_base::load_tensors in src/llama-model.cpp, with split_mode layer and no tensor_split.
    """
    if not gpus or n_gpu_layers <= 0:
        return Placement((HOST,) * n_layer_all, HOST, 0)
    total = sum(gpu.free for gpu in gpus)
    splits = [free / max(total, 1) for free in accumulate(gpu.free for gpu in gpus)]
    first, active = max(n_layer_all + 1 - n_gpu_layers, 0), min(n_gpu_layers, n_layer_all + 1)

    def device(i: int) -> str:
        return HOST if i < first else gpus[min(bisect_right(splits, (i - first) / active), len(gpus) - 1)].name

    return Placement(tuple(device(i) for i in range(n_layer_all)), device(n_layer_all), n_gpu_layers)
