"""Where activations are measured: which nodes of llama.cpp's graph are which site of clip_bounds.bin."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.roles import layer_of, recurrent_layers
from a3b_quantize.bounds import ALL_EXPERTS, SITES
from a3b_quantize.histogram import Histogram

# Node name -> site. Source: the `cb` calls of src/models/{qwen35moe,qwen3next,qwen3moe,llama}.cpp and src/llama-graph.cpp
NODES = {
    "attn_norm": "attn_in", "Kcur": "k_cache", "Vcur": "v_cache", "attn_gated": "attn_out_in", "kqv_out": "attn_out_in",
    "final_output": "ssm_out_in", "attn_post_norm": "ffn_in", "ffn_norm": "ffn_in", "l_out": "residual",
}  # fmt: skip
EXPERT_NODES = {f"ffn_moe_{act}": "down_in" for act in ("swiglu", "silu", "geglu", "gelu", "reglu", "relu")} | {"ffn_moe_down": "down_out"}
DENSE_NODES = {f"ffn_{act}": "down_in" for act in ("swiglu", "silu", "geglu", "gelu", "reglu", "relu")} | {"ffn_out": "down_out"}
TOPK = "ffn_moe_topk"
# Nodes whose name is first given to what goes into them, before RoPE: the last one of a batch is what the cache gets.
LAST_WINS = ("k_cache", "v_cache")
NODE = re.compile(r"(\w+)-(\d+)")


class Collector:
    """Owns a histogram for each (layer, site, expert) that was seen. `receive` takes nodes as `a3b_gguf.llama.watch` gives them."""

    def __init__(self, tensor_names: Iterable[str]) -> None:
        names = list(tensor_names)
        self.recurrent = recurrent_layers(names)
        self.with_experts = frozenset(layer_of(name) for name in names if "_exps." in name)
        self.histograms: dict[tuple[int, str, int], Histogram] = {}
        self._last: dict[tuple[int, str], NDArray[np.float32]] = {}
        self._experts: dict[int, NDArray[np.int32]] = {}

    def site(self, node: str) -> tuple[int, str] | None:
        """Layer and site (or TOPK) of a node, None when it is of no interest."""
        match = NODE.fullmatch(node)
        if not match:
            return None
        name, layer = match[1], int(match[2])
        nodes = EXPERT_NODES | {TOPK: TOPK} if layer in self.with_experts else DENSE_NODES
        found = NODES.get(name) or nodes.get(name)
        if found == "attn_in" and layer in self.recurrent:
            found = "ssm_in"
        return None if found is None else (layer, found)

    def wanted(self, node: str) -> bool:
        return self.site(node) is not None

    def receive(self, node: str, values: NDArray[np.float32] | NDArray[np.int32]) -> None:
        found = self.site(node)
        if found is None:
            return
        layer, site = found
        if values.dtype == np.int32:
            self._experts[layer] = values.astype(np.int32)
        elif site in LAST_WINS:
            self._last[layer, site] = values.astype(np.float32)
        else:
            self._add(layer, site, ALL_EXPERTS, values.astype(np.float32))
            if site == "down_in" and layer in self._experts:
                self._add_experts(layer, site, values.astype(np.float32))
        if site == "residual":
            self._flush(layer)

    def _add(self, layer: int, site: str, expert: int, values: NDArray[np.float32]) -> None:
        self.histograms.setdefault((layer, site, expert), Histogram()).add(values)

    def _add_experts(self, layer: int, site: str, values: NDArray[np.float32]) -> None:
        """values: [tokens, experts used, channels], or without tokens when there is one."""
        chosen = self._experts.pop(layer).reshape(-1)
        rows = values.reshape(len(chosen), values.shape[-1])
        for expert in np.unique(chosen):
            self._add(layer, site, int(expert), rows[chosen == expert])

    def _flush(self, layer: int) -> None:
        """The layer is through: what it left last under a name that wins late is final."""
        for site in LAST_WINS:
            if (layer, site) in self._last:
                self._add(layer, site, ALL_EXPERTS, self._last.pop((layer, site)))

    def ordered(self) -> list[tuple[int, str, int, Histogram]]:
        """Everything seen, by layer, site and expert."""
        keys = sorted(self.histograms, key=lambda key: (key[0], SITES.index(key[1]), key[2]))
        return [(*key, self.histograms[key]) for key in keys]
