"""Where the layers of a model live: the split that llama.cpp makes, and the expert tensors that stay in RAM."""

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

    cpu_experts: blocks on a GPU whose routed experts stay in RAM all the same. cpu_tensors: (block, expert tensor) of blocks whose
    experts stay there in part. tensor_split: layers of each GPU as llama.cpp is told; empty: it splits by free memory.
    """

    layers: tuple[str, ...]
    output: str
    n_gpu_layers: int
    cpu_experts: tuple[int, ...] = ()
    cpu_tensors: tuple[tuple[int, str], ...] = ()
    tensor_split: tuple[int, ...] = ()

    @property
    def uses_gpu(self) -> bool:
        return self.n_gpu_layers > 0 and (self.output != HOST or any(device != HOST for device in self.layers))

    @property
    def has_overrides(self) -> bool:
        return bool(self.cpu_experts or self.cpu_tensors)

    def layers_on(self, device: str) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.layers) if name == device)

    def expert_device(self, layer: int, tensor: str = "") -> str:
        """Where an expert tensor of `layer` is; without a name: where those are that nothing else is said of."""
        return HOST if layer in self.cpu_experts or (layer, tensor) in self.cpu_tensors else self.layers[layer]

    def with_cpu_experts(self, layers: Sequence[int], tensors: Sequence[tuple[int, str]] = ()) -> Placement:
        """The same split with the experts of `layers`, and single `tensors`, in RAM; layers that are there anyway need no mention."""
        whole = {i for i in layers if i < len(self.layers) and self.layers[i] != HOST}
        part = {(i, name) for i, name in tensors if i not in whole and self.layers[i] != HOST}
        return replace(self, cpu_experts=tuple(sorted(whole)), cpu_tensors=tuple(sorted(part)))


def place(n_layer_all: int, gpus: Sequence[Device], n_gpu_layers: int, tensor_split: Sequence[int] = ()) -> Placement:
    """The last `n_gpu_layers` of blocks and output on the GPUs, split in proportion to `tensor_split` or to their free memory.

    Source: llama_model_base::load_tensors in src/llama-model.cpp, split_mode layer.
    """
    if not gpus or n_gpu_layers <= 0:
        return Placement((HOST,) * n_layer_all, HOST, 0)
    shares = tensor_split or [gpu.free for gpu in gpus]
    total = sum(shares)
    splits = [share / max(total, 1) for share in accumulate(shares)]
    first, active = max(n_layer_all + 1 - n_gpu_layers, 0), min(n_gpu_layers, n_layer_all + 1)

    def device(i: int) -> str:
        return HOST if i < first else gpus[min(bisect_right(splits, (i - first) / active), len(gpus) - 1)].name

    layers = tuple(device(i) for i in range(n_layer_all))
    return Placement(layers, device(n_layer_all), n_gpu_layers, tensor_split=tuple(tensor_split))
