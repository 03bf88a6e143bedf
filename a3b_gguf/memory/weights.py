"""Weights by device: what is loaded, what is copied into another order, and the vision encoder beside it."""

from __future__ import annotations

from collections import defaultdict

from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Held, Term


def weights(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """Tensors by device. The token embedding is always in RAM; an output that shares it is loaded a second time on a GPU.

    In RAM they are pages of the mapped file, or read into place: into pinned memory when a GPU is in use, from which it copies
    fastest. Source: load_tensors (dev_input, dev_layer, dev_output) and make_cpu_buft_list (host buffers) in src/llama-model.cpp.
    """
    dense: dict[str, int] = defaultdict(int)
    experts: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.layers):
        dense[placement.layers[i]] += layer.dense + layer.norms
        for name, n_bytes in layer.expert_tensors:
            experts[placement.expert_device(i, name)] += n_bytes
    tied = facts.embedding_bytes if placement.output != HOST else 0
    in_ram: Held = "mapped" if settings.use_mmap else "pinned" if placement.uses_gpu else "own"

    def term(name: str, device: str, n_bytes: int) -> Term:
        return Term(name, device, n_bytes, held=in_ram if device == HOST else "own")

    return [
        term("token embedding", HOST, facts.embedding_bytes),
        *(term("routed experts", device, n_bytes) for device, n_bytes in experts.items()),
        *(term("attention, dense and norms", device, n_bytes) for device, n_bytes in dense.items()),
        term("output", placement.output, (facts.output_bytes or tied) + facts.other_bytes),
        *(term("MTP block", device, n_bytes) for device, n_bytes in mtp_weights(facts, placement, settings).items()),
    ]


def mtp_weights(facts: Facts, placement: Placement, settings: Settings) -> dict[str, int]:
    """Bytes of the MTP blocks by device; without load_mtp they are skipped. Source: TENSOR_SKIP in src/models/qwen35moe.cpp."""
    found: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.nextn if settings.load_mtp else (), facts.n_layer):
        found[placement.layers[i]] += layer.dense + layer.norms
        for name, n_bytes in layer.expert_tensors:
            found[placement.expert_device(i, name)] += n_bytes
    return found


def repacked_copy(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """Rows interleaved for the CPU's kernels: a second copy beside a mapped file, none when the file is read into place.

    Source: make_cpu_buft_list in src/llama-model.cpp (a GPU's host buffer comes before the repacking one, so with a GPU in use
    nothing is repacked) and ggml_repack_get_optimal_repack_type in ggml/src/ggml-cpu/repack.cpp.
    """
    if placement.uses_gpu or not settings.use_mmap:
        return []
    return [Term("copy repacked for the CPU", HOST, sum(layer.repacked for layer in facts.layers), exact=False)]


def projector(facts: Facts, placement: Placement) -> list[Term]:
    """The vision encoder: its weights, and the intermediate tensors of one image.

    It goes to the first GPU, with all its layers (clip_init in tools/mtmd/clip.cpp). At its worst a layer holds the image's residual,
    q, k, v and the wide half of its feed-forward part (clip_graph::build_vit), in f32; attention is flash attention.
    """
    vision = facts.projector
    if vision is None:
        return []
    device = next((name for name in placement.layers if name != HOST), placement.output)
    graph = 4 * vision.n_patches * (4 * vision.n_embd + max(2 * vision.n_ff, 4 * vision.n_embd))
    return [
        Term("vision encoder", device, vision.weight_bytes),
        Term("vision encoder's buffer", device, graph, exact=False),
    ]
