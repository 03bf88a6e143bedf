"""Compute buffers: what a graph holds at its worst moment, by replaying llama.cpp's allocator on the graph's sizes.

Checked against dry runs of the installed llama.cpp over a grid of contexts, caches, batches and slots: equal to the printed 0.01 MiB for
Qwen3.6-35B-A3B, Qwen3-30B-A3B and a dense llama, within 0.03 MiB for Qwen3-Next-80B-A3B (benchmarks/bench_plan.py). For GPUs the oracle is
the same llama.cpp with GPUs that are not there (tests/pretend_gpu.py): its scheduler and allocator, without CUDA's own fusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from a3b_gguf.machine import Device
from a3b_gguf.memory.allocate import Peaks
from a3b_gguf.memory.cache import f16_copies
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.graph import model_peaks, mtp_peaks
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Term
from a3b_gguf.memory.widths import Widths, score_bytes, widths_of
from a3b_gguf.tensors import TYPES

CHECKED = ("qwen35moe", "qwen3moe", "qwen3next", "llama")  # architectures whose graphs were compared with dry runs
PIPELINE_COPIES = 4  # GGML_SCHED_MAX_COPIES of ggml/src/ggml-backend.cpp
# Backends without ggml_cuda_match_moe_weighted_reduction, for which CUDA keeps the results of experts until they are summed up.
KEEP_NOTHING = ("Vulkan", "MTL")
# A search asks for the same graph again and again: only contexts, batches and cache types change it.
replayed = lru_cache(maxsize=512)(model_peaks)
replayed_mtp = lru_cache(maxsize=512)(mtp_peaks)


def compute_buffers(facts: Facts, used: Sequence[Device], placement: Placement, settings: Settings) -> list[Term]:
    """The graph's intermediate tensors: all on the host without a GPU, else inputs on the host and the rest on each GPU.

    Source: llama_context::sched_reserve in src/llama-context.cpp. A GPU that reads a prompt computes with copies of the experts that
    are in RAM, and of several the first does it for all (ggml_backend_sched_backend_id_from_cur in ggml/src/ggml-backend.cpp); so it
    does for layers that are in RAM, with copies of their weights and caches. f16 copies of the cache and copies of weights are terms
    of their own: what the buffer grows by for them. The host's inputs are counted high when layers are in RAM.
    """
    widths = widths_of(facts, settings, facts.layers)
    if not used:
        return [
            Term("compute buffer", HOST, replayed(widths, False).host, exact=facts.architecture in CHECKED),
            Term("attention scores as V is", HOST, converted_scores(facts, settings), exact=False),
        ]
    all_layers, n_in_ram = placement.n_gpu_layers > facts.n_layer_all, len(placement.layers_on(HOST))
    moved = in_ram(facts, placement)
    host = replayed(widths, all_layers).host
    piped = len(used) > 1 and all_layers and not placement.has_overrides
    if piped:
        host += (PIPELINE_COPIES - 1) * (widths.inputs + widths.hidden + 4 * widths.n_rows)  # the last: numbers of the tokens
    found = [Term("compute buffer", HOST, host, exact=False, held="pinned")]
    for gpu in used:
        keeps, copies = gpu.backend not in KEEP_NOTHING, f16_copies(facts, settings, gpu.backend)
        plain = replayed(replace(widths, keeps_experts=keeps), True).device
        whole = copying = replayed(replace(widths, keeps_experts=keeps, f16_copies=copies), True).device
        if gpu is used[0] and (moved or n_in_ram):
            partly = widths_of(facts, settings, facts.layers, n_in_ram=min(n_in_ram, facts.n_layer), staged=True)
            whole = replayed(replace(partly, keeps_experts=keeps, f16_copies=copies), True, moved).device
        plain, copying = min(plain, whole), min(copying, whole)  # more to hold may fall into better places
        found += [
            Term("compute buffer", gpu.name, plain + (pipeline(widths, gpu is used[0]) if piped else 0), exact=False),
            Term("f16 copy of one layer's cache", gpu.name, max(0, copying - plain), exact=False),
            Term("staging of layers in RAM" if n_in_ram else "staging of experts", gpu.name, whole - max(plain, copying), exact=False),
        ]
    return found


def converted_scores(facts: Facts, settings: Settings) -> int:
    """The CPU's work space: the scores once more, in the type of V, before they are multiplied by it. llama.cpp does not print it.

    Source: ggml_graph_plan in ggml/src/ggml-cpu/ggml-cpu.c (GGML_OP_MUL_MAT).
    """
    return 0 if settings.kv_type_v == "f32" else score_bytes(facts, settings, settings.n_rows, TYPES[settings.kv_type_v].block_bytes)


def pipeline(widths: Widths, first: bool) -> int:
    """What a GPU holds more when several work as a pipeline: copies of the inputs, and of the rows that it is handed.

    All layers on GPUs and nothing overridden. Source: llama_context::sched_reserve in src/llama-context.cpp (pipeline_parallel),
    ggml_backend_sched_split_graph. The first GPU is handed the token embeddings; the next ones a layer's result, and the same normed
    (its RMS_NORM has no weight, so it stays with the layer before).
    """
    return (PIPELINE_COPIES - 1) * widths.inputs + PIPELINE_COPIES * widths.hidden * (1 if first else 2)


def in_ram(facts: Facts, placement: Placement) -> tuple[tuple[str, int], ...]:
    """The expert tensors that are in RAM, the largest of each name: they pass through the same places layer after layer."""
    largest: dict[str, int] = {}
    for i, layer in enumerate(facts.layers):
        for name, n_bytes in layer.expert_tensors:
            if placement.expert_device(i, name) == HOST:
                largest[name] = max(n_bytes, largest.get(name, 0))
    return tuple(sorted(largest.items()))


def mtp_buffers(facts: Facts, gpu: Device | None, settings: Settings, nextn: tuple[Layer, ...]) -> Peaks:
    """Compute buffers of the MTP context, whose graph is its block alone."""
    widths = widths_of(facts, settings, nextn)
    if gpu is None:
        return replayed_mtp(widths, False)
    keeps, copies = gpu.backend not in KEEP_NOTHING, f16_copies(facts, settings, gpu.backend)
    return replayed_mtp(replace(widths, keeps_experts=keeps, f16_copies=copies), True)
