"""Every piece of memory that a loaded model takes: its name, its bytes, its device, and the formula that llama.cpp uses for it."""

from __future__ import annotations

from collections.abc import Sequence

from a3b_gguf.machine import Device
from a3b_gguf.memory.cache import checkpoints, kept_texts, kv_cache, output_buffer, recurrent_state
from a3b_gguf.memory.compute import compute_buffers
from a3b_gguf.memory.draft import mtp_context
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Term
from a3b_gguf.memory.weights import projector, repacked_copy, weights
from a3b_gguf.units import MIB

# What the driver takes on a GPU before llama.cpp asks for anything. Published readings of nvidia-smi lie 0.25-0.55 GiB above
# the sum of llama.cpp's buffers, the desktop included; machine.VRAM_IN_USE is the desktop's share.
DRIVER_CONTEXT = 300 * MIB


def all_terms(facts: Facts, gpus: Sequence[Device], placement: Placement, settings: Settings) -> tuple[Term, ...]:
    """Every term above zero, host first, then the GPUs in order. A GPU without layers is left alone and has none."""
    used = list(gpus) if placement.uses_gpu else []
    names = [gpu.name for gpu in used]
    terms = [
        *weights(facts, placement, settings),
        *repacked_copy(facts, placement, settings),
        *projector(facts, placement),
        *kv_cache(facts, placement, settings),
        *recurrent_state(facts, placement, settings),
        checkpoints(facts, settings),
        kept_texts(settings),
        output_buffer(facts, settings),
        *compute_buffers(facts, used, placement, settings),
        *mtp_context(facts, used, placement, settings),
        *(Term("driver context", name, DRIVER_CONTEXT, exact=False) for name in names),
    ]
    order = {name: i for i, name in enumerate((HOST, *names))}
    return tuple(sorted((term for term in terms if term.n_bytes), key=lambda term: order[term.device]))
