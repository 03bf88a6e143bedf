"""What `a3b serve` says once the model is loaded: predicted memory beside what llama.cpp took."""

from __future__ import annotations

from collections import defaultdict

from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.plan import Plan
from a3b_gguf.report.console import say, say_table
from a3b_gguf.units import MIB
from a3b_server.messages import Facts

# Terms of a plan by the kind of buffer in which llama.cpp puts them. Terms that are not here are not printed by llama.cpp.
KIND_OF_TERM = {
    "token embedding": "model",
    "routed experts": "model",
    "attention, dense and norms": "model",
    "output": "model",
    "copy repacked for the CPU": "model",
    "KV cache": "kv",
    "recurrent state": "recurrent",
    "compute buffer": "compute",
    "staging of one expert tensor": "compute",
    "output buffer": "output",
}
Sizes = dict[tuple[str, str], int]


def show_loaded(plan: Plan, facts: Facts) -> None:
    """A table of both, and how many expert tensors went where they were told to go."""
    predicted, real = predicted_sizes(plan), real_sizes(plan, facts)
    rows = []
    for kind, device in sorted({*predicted, *real}, key=lambda key: (list(KIND_OF_TERM.values()).index(key[0]), key[1])):
        expected, found = predicted.get((kind, device), 0), real.get((kind, device), 0)
        rows.append((kind, device, f"{expected / MIB:,.1f}", f"{found / MIB:,.1f}", f"{(found - expected) / MIB:+,.1f}"))
    say_table("Memory in MiB", ("buffer", "device", "predicted", "llama.cpp", "difference"), rows, numeric=(2, 3, 4))
    if facts.n_moved:
        say(f"{facts.n_moved} expert tensors of {len(plan.load.cpu_expert_layers)} layers are in RAM, as planned")


def predicted_sizes(plan: Plan) -> Sizes:
    """Bytes by kind of buffer and device."""
    sizes: Sizes = defaultdict(int)
    for term in plan.terms:
        if term.name in KIND_OF_TERM:
            sizes[KIND_OF_TERM[term.name], term.device] += term.n_bytes
    return sizes


def real_sizes(plan: Plan, facts: Facts) -> Sizes:
    """Bytes that llama.cpp printed, its buffer types taken together: CPU, CPU_Mapped, CPU_REPACK and pinned CUDA_Host are all RAM."""
    sizes: Sizes = defaultdict(int)
    for buffer in facts.buffers:
        in_ram = buffer.device.startswith("CPU") or buffer.device.endswith("_Host")
        sizes[buffer.kind, HOST if in_ram else buffer.device] += buffer.n_bytes
    return sizes
