"""Every piece of memory that a loaded model takes: its name, its bytes, its device, and the formula that llama.cpp uses for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from a3b_gguf.machine import Device
from a3b_gguf.memory.compute import activations, expert_staging, host_inputs, logits, mask
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.tensors import TYPES
from a3b_gguf.units import MIB

# What the driver takes on a GPU before llama.cpp asks for anything. Published readings of nvidia-smi lie 0.25-0.55 GiB above
# the sum of llama.cpp's buffers, the desktop included; machine.VRAM_IN_USE is the desktop's share.
DRIVER_CONTEXT = 300 * MIB


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes of one kind on one device. exact: llama.cpp allocates this number; otherwise it is an estimate."""

    name: str
    device: str
    n_bytes: int
    exact: bool = True


def all_terms(facts: Facts, gpus: Sequence[Device], placement: Placement, settings: Settings) -> tuple[Term, ...]:
    """Every term above zero, host first, then the GPUs in order. A GPU without layers is left alone and has none."""
    used = [gpu.name for gpu in gpus] if placement.uses_gpu else []
    terms = [
        *weights(facts, placement),
        *repacked_copy(facts, placement, settings),
        *kv_cache(facts, placement, settings),
        *recurrent_state(facts, placement, settings),
        output_buffer(facts, settings),
        *compute_buffers(facts, used, placement, settings),
        *f16_copies(facts, used, placement, settings),
        *(Term("driver context", name, DRIVER_CONTEXT, exact=False) for name in used),
    ]
    order = {name: i for i, name in enumerate((HOST, *used))}
    return tuple(sorted((term for term in terms if term.n_bytes), key=lambda term: order[term.device]))


def weights(facts: Facts, placement: Placement) -> list[Term]:
    """Tensors by device. The token embedding is always in RAM; an output that shares it is loaded a second time on a GPU.

    Source: load_tensors (dev_input, dev_layer, dev_output) in src/llama-model.cpp; MTP blocks are skipped without load_mtp.
    """
    dense: dict[str, int] = defaultdict(int)
    experts: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.layers):
        dense[placement.layers[i]] += layer.dense + layer.norms
        experts[placement.expert_device(i)] += layer.experts
    tied = facts.embedding_bytes if placement.output != HOST else 0
    return [
        Term("token embedding", HOST, facts.embedding_bytes),
        *(Term("routed experts", device, n_bytes) for device, n_bytes in experts.items()),
        *(Term("attention, dense and norms", device, n_bytes) for device, n_bytes in dense.items()),
        Term("output", placement.output, (facts.output_bytes or tied) + facts.other_bytes),
    ]


def repacked_copy(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """Rows interleaved for the CPU's kernels: a second copy beside a mapped file, none when the file is read into place.

    Source: make_cpu_buft_list in src/llama-model.cpp (a GPU's host buffer comes before the repacking one, so with a GPU in use
    nothing is repacked) and ggml_repack_get_optimal_repack_type in ggml/src/ggml-cpu/repack.cpp.
    """
    if placement.uses_gpu or not settings.use_mmap:
        return []
    return [Term("copy repacked for the CPU", HOST, sum(layer.repacked for layer in facts.layers), exact=False)]


def kv_cache(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """n_ctx rows of K and of V in each attention layer, on the layer's device.

    Source: llama_kv_cache::llama_kv_cache in src/llama-kv-cache.cpp, hybrid layers by the filter in llama_model::create_memory.
    """
    found: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.layers):
        found[placement.layers[i]] += kv_row_bytes(facts, layer.n_head_kv, settings) * settings.n_ctx
    return [Term("KV cache", device, n_bytes) for device, n_bytes in found.items()]


def kv_row_bytes(facts: Facts, n_head_kv: int, settings: Settings) -> int:
    """Bytes of one token in one layer. A quantized type needs whole blocks, which `planner.rules` checks by head size."""
    k, v = TYPES[settings.kv_type_k], TYPES[settings.kv_type_v]
    return (n_head_kv * facts.k_dim * k.block_bytes) // k.block + (n_head_kv * facts.v_dim * v.block_bytes) // v.block


def recurrent_state(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """Convolution and DeltaNet states in f32, one of each for every sequence and recurrent layer; no context length in it.

    Source: llama_memory_recurrent in src/llama-memory-recurrent.cpp, n_embd_r and n_embd_s in src/llama-hparams.cpp.
    """
    found: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.layers):
        if layer.recurrent:
            found[placement.layers[i]] += 4 * (facts.conv_state + facts.ssm_state) * settings.n_seq_max
    return [Term("recurrent state", device, n_bytes) for device, n_bytes in found.items()]


def output_buffer(facts: Facts, settings: Settings) -> Term:
    """Logits of every row that one call may ask for. Source: llama_context::output_reserve in src/llama-context.cpp."""
    return Term("output buffer", HOST, 4 * facts.n_vocab * max(settings.n_outputs_max, settings.n_seq_max))


def compute_buffers(facts: Facts, used: Sequence[str], placement: Placement, settings: Settings) -> list[Term]:
    """The graph's intermediate tensors: all on the host without a GPU, else inputs on the host and the rest on each GPU.

    Source: llama_context::sched_reserve in src/llama-context.cpp; the sizes by `memory.compute`. With several GPUs, all layers on
    them and nothing overridden, llama.cpp runs them as a pipeline and keeps GGML_SCHED_MAX_COPIES = 4 copies of the inputs.
    """
    inputs, graph, last = mask(settings), activations(facts, settings), logits(facts, settings)
    if not used:  # inputs keep their place in host memory, while a GPU's copy of the mask is gone when the logits come
        return [Term("compute buffer", HOST, inputs + max(graph, last), exact=False)]
    all_layers = placement.n_gpu_layers > facts.n_layer_all
    copies = 4 if len(used) > 1 and all_layers and not placement.cpu_experts else 1
    host = host_inputs(facts, settings) if all_layers else inputs + graph
    staging = expert_staging(facts, placement)
    return [
        Term("compute buffer", HOST, host, exact=False),
        *(Term("compute buffer", name, max(inputs * copies + graph, last), exact=False) for name in used),
        Term("staging of one expert tensor", used[0], staging, exact=False),  # the first GPU computes what it can for the CPU
    ]


def f16_copies(facts: Facts, used: Sequence[str], placement: Placement, settings: Settings) -> list[Term]:
    """K and V of one layer as f16 while a prompt is read: attention kernels of GPUs take quantized caches for single tokens only.

    Source: launch_fattn in ggml/src/ggml-cuda/fattn-common.cuh (K_f16, V_f16 from the memory pool).
    """
    if TYPES[settings.kv_type_k].is_float and TYPES[settings.kv_type_v].is_float:
        return []
    dims = (0 if TYPES[settings.kv_type_k].is_float else facts.k_dim) + (0 if TYPES[settings.kv_type_v].is_float else facts.v_dim)
    largest = {name: max((facts.layers[i].n_head_kv for i in placement.layers_on(name) if i < facts.n_layer), default=0) for name in used}
    return [Term("f16 copy of one layer's cache", name, 2 * settings.n_ctx * heads * dims, exact=False) for name, heads in largest.items()]
