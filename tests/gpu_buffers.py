"""What llama.cpp reserves for graphs on GPUs that are not there, for many settings: tests/golden/gpu_buffers.json, and how it is made.

    python tests/gpu_buffers.py        asks the installed llama.cpp (a minute of CPU time) and writes the file
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.llama.params import LoadParams
from a3b_gguf.machine import Device
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import place
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.terms import all_terms
from a3b_gguf.planner.check import KIND_OF_TERM
from a3b_gguf.units import GIB, MIB
from kin_headers import SMALL_VOCAB, sparse_30b, sparse_80b, sparse_dense
from pretend_gpu import buffers_on_gpus
from true_header import sparse_35b

FILE = Path(__file__).parent / "golden" / "gpu_buffers.json"
MODELS: dict[str, Callable[[Path], Path]] = {
    "35b": lambda path: sparse_35b(path, "iq4_nl", SMALL_VOCAB),
    "30b": sparse_30b,
    "80b": sparse_80b,
    "dense": sparse_dense,
}


@dataclass(frozen=True, slots=True)
class Case:
    """backend: "CUDA", or "Vulkan" for GPUs that add nothing of their own."""

    model: str
    backend: str
    n_gpus: int
    load: LoadParams


def load(
    n_ctx: int, kv: str, rows: int, n_cpu_moe: int = 0, n_gpu_layers: int = 99, slots: int = 1, split: tuple[float, ...] = ()
) -> LoadParams:
    return LoadParams(
        n_ctx, slots, rows, rows, slots, n_gpu_layers, tuple(range(n_cpu_moe)), kv, kv, use_mmap=False, tensor_split=split
    )  # fmt: skip


def cases() -> Iterator[Case]:
    kinds, batches = ("f16", "q8_0"), (512, 2048)
    for n_ctx, kv, rows, (n_moe, n_gpu) in itertools.product((16384, 262144), kinds, batches, ((0, 99), (40, 99), (0, 20))):
        yield Case("35b", "CUDA", 1, load(n_ctx, kv, rows, n_moe, n_gpu))
    for kv, (n_moe, n_gpu) in itertools.product(kinds, ((0, 99), (12, 99), (0, 1))):
        yield Case("35b", "Vulkan", 1, load(65536, kv, 512, n_moe, n_gpu, 4))
    for kv, n_moe in itertools.product(kinds, (0, 12)):
        yield Case("35b", "CUDA", 2, load(65536, kv, 512, n_moe, split=(20.0, 21.0)))
    for kv, n_moe in itertools.product(kinds, (0, 48)):
        yield Case("30b", "CUDA", 1, load(65536, kv, 2048, n_moe))
        yield Case("80b", "CUDA", 1, load(65536, kv, 512, n_moe))
    for kv, n_gpu in itertools.product((*kinds, "bf16"), (99, 10)):
        yield Case("dense", "CUDA", 1, load(8192, kv, 512, 0, n_gpu))


def predicted(facts: Facts, case: Case) -> dict[str, float]:
    """Compute buffers by our replay, in MiB, by device."""
    asked = case.load
    kinds = asked.kv_type_k, asked.kv_type_v
    settings = Settings(asked.n_ctx, asked.n_seq_max, asked.n_ubatch, asked.n_outputs_max, *kinds, use_mmap=False)
    gpus = [Device(f"{case.backend}{i}", 64 * GIB, 64 * GIB) for i in range(case.n_gpus)]
    placement = place(facts.n_layer_all, gpus, min(asked.n_gpu_layers, facts.n_layer_all + 1), tuple(map(int, asked.tensor_split)))
    found: dict[str, float] = {}
    for term in all_terms(facts, gpus, placement.with_cpu_experts(asked.cpu_expert_layers), settings):
        if KIND_OF_TERM.get(term.name) == "compute":
            name = term.device.replace("Vulkan", "CUDA")  # as the pretended ones are always called
            found[name] = found.get(name, 0.0) + term.n_bytes / MIB
    return found


def main() -> None:
    asked = list(cases())
    rows: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: make(Path(folder) / f"{name}.gguf") for name, make in MODELS.items()}
        for key in dict.fromkeys((case.model, case.backend, case.n_gpus) for case in asked):
            chosen = [i for i, case in enumerate(asked) if (case.model, case.backend, case.n_gpus) == key]
            found = buffers_on_gpus(files[key[0]], [asked[i].load for i in chosen], key[2], key[1] == "CUDA")
            rows |= dict(zip(chosen, found, strict=True))
    FILE.write_text(json.dumps([rows[i] for i in range(len(asked))], indent=0) + "\n")


if __name__ == "__main__":
    main()
