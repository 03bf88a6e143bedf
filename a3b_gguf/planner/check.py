"""A plan beside what llama.cpp says: its dry run before loading, its log and the process after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from a3b_gguf.llama.buffers import Buffer
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.plan import Plan
from a3b_gguf.units import MIB

# Terms of a plan by the kind of buffer in which llama.cpp puts them. Terms that are not here are not llama.cpp's to tell.
KIND_OF_TERM = {
    "token embedding": "model",
    "routed experts": "model",
    "attention, dense and norms": "model",
    "output": "model",
    "copy repacked for the CPU": "model",
    "MTP block": "model",
    "KV cache": "context",
    "recurrent state": "context",
    "MTP context: KV cache": "context",
    "compute buffer": "compute",
    "staging of experts": "compute",
    "staging of layers in RAM": "compute",
    "f16 copy of one layer's cache": "compute",
    "MTP context: compute buffer": "compute",
    "output buffer": "output",
    "MTP context: output buffer": "output",
}
KIND_OF_BUFFER = {"kv": "context", "recurrent": "context"}  # printed apart, counted together in llama.cpp's own table
KINDS = ("model", "context", "compute", "output")
AGREES_SHARE, AGREES_BYTES = 0.02, 16 * MIB


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one kind on one device. exact: the plan says that its number is what llama.cpp allocates."""

    kind: str
    device: str
    predicted: int
    found: int
    exact: bool = True

    @property
    def difference(self) -> int:
        return self.found - self.predicted


@dataclass(frozen=True, slots=True)
class Check:
    """A plan beside sizes that llama.cpp told."""

    rows: tuple[Row, ...]

    @property
    def differences(self) -> dict[str, int]:
        """By device, bytes that llama.cpp takes beyond the plan."""
        sums: dict[str, int] = defaultdict(int)
        for row in self.rows:
            sums[row.device] += row.difference
        return dict(sums)

    @property
    def agrees(self) -> bool:
        """Whether every device is within 2 % of the plan, or 16 MiB."""
        predicted: dict[str, int] = defaultdict(int)
        for row in self.rows:
            predicted[row.device] += row.predicted
        return all(abs(d) <= max(AGREES_BYTES, AGREES_SHARE * predicted[device]) for device, d in self.differences.items())


def compare(plan: Plan, buffers: Iterable[Buffer]) -> Check:
    """`plan` beside `buffers`. Where these have no model sizes, as in a log of a dry run, the weights are left out of both."""
    found = found_sizes(buffers)
    predicted: dict[tuple[str, str], int] = defaultdict(int)
    estimated: set[tuple[str, str]] = set()
    for term in plan.terms:
        kind = KIND_OF_TERM.get(term.name)
        if kind:
            predicted[kind, term.device] += term.n_bytes
            if not term.exact:
                estimated.add((kind, term.device))
    kinds = KINDS if any(kind == "model" for kind, _ in found) else KINDS[1:]
    keys = sorted({key for key in (*predicted, *found) if key[0] in kinds}, key=lambda key: (kinds.index(key[0]), key[1]))
    return Check(tuple(Row(*key, predicted.get(key, 0), found.get(key, 0), key not in estimated) for key in keys))


def found_sizes(buffers: Iterable[Buffer]) -> dict[tuple[str, str], int]:
    """Bytes by kind and device. CPU, CPU_Mapped, CPU_REPACK and pinned CUDA_Host are all RAM."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for buffer in buffers:
        in_ram = buffer.device.startswith("CPU") or buffer.device.endswith("_Host")
        sizes[KIND_OF_BUFFER.get(buffer.kind, buffer.kind), HOST if in_ram else buffer.device] += buffer.n_bytes
    return dict(sizes)
