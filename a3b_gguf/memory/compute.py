"""Compute buffers: what a graph holds at its worst moment, by replaying llama.cpp's allocator on the graph's sizes.

Checked against dry runs of the installed llama.cpp over a grid of contexts, caches, batches and slots: equal to the printed 0.01 MiB for
Qwen3.6-35B-A3B, Qwen3-30B-A3B and a dense llama, within 0.03 MiB for Qwen3-Next-80B-A3B (benchmarks/bench_plan.py). On a GPU, where a dry
run needs the GPU, the replay was checked against the published log of llama.cpp issue 23527.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from a3b_gguf.memory.allocate import Peaks
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.graph import model_peaks, mtp_peaks
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Term
from a3b_gguf.memory.widths import widths_of

CHECKED = ("qwen35moe", "qwen3moe", "qwen3next", "llama")  # architectures whose graphs were compared with dry runs
# A search asks for the same graph again and again: only contexts, batches and cache types change it.
replayed = lru_cache(maxsize=512)(model_peaks)
replayed_mtp = lru_cache(maxsize=512)(mtp_peaks)


def compute_buffers(facts: Facts, used: Sequence[str], placement: Placement, settings: Settings) -> list[Term]:
    """The graph's intermediate tensors: all on the host without a GPU, else inputs on the host and the rest on each GPU.

    Source: llama_context::sched_reserve in src/llama-context.cpp. A GPU that reads a prompt computes with copies of the experts that
    are in RAM, and of several the first does it for all (ggml_backend_sched_backend_id_from_cur in ggml/src/ggml-backend.cpp). With
    several GPUs, all layers on them and nothing overridden, llama.cpp runs them as a pipeline and keeps GGML_SCHED_MAX_COPIES = 4
    copies of the inputs.
    """
    widths = widths_of(facts, settings, facts.layers)
    if not used:
        return [Term("compute buffer", HOST, replayed(widths, False).host, exact=facts.architecture in CHECKED)]
    plain = replayed(widths, True)
    all_layers = placement.n_gpu_layers > facts.n_layer_all
    copies = 3 * widths.mask if len(used) > 1 and all_layers and not placement.has_overrides else 0
    host = plain.host if all_layers else replayed(widths, False).host
    staging = max(0, replayed(widths, True, in_ram(facts, placement)).device - plain.device)
    return [
        Term("compute buffer", HOST, host, exact=False, held="pinned"),
        *(Term("compute buffer", name, plain.device + copies, exact=False) for name in used),
        Term("staging of experts", used[0], staging, exact=False),
    ]


def in_ram(facts: Facts, placement: Placement) -> tuple[tuple[str, int], ...]:
    """The expert tensors that are in RAM, the largest of each name: they pass through the same places layer after layer."""
    largest: dict[str, int] = {}
    for i, layer in enumerate(facts.layers):
        for name, n_bytes in layer.expert_tensors:
            if placement.expert_device(i, name) == HOST:
                largest[name] = max(n_bytes, largest.get(name, 0))
    return tuple(sorted(largest.items()))


def mtp_buffers(facts: Facts, gpu: bool, settings: Settings, nextn: tuple[Layer, ...]) -> Peaks:
    """Compute buffers of the MTP context, whose graph is its block alone."""
    return replayed_mtp(widths_of(facts, settings, nextn), gpu)
