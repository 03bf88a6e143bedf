"""What is asked of the planner and what it answers: wishes in, a plan with every byte and every reason out."""

from __future__ import annotations

from dataclasses import dataclass

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.params import KV_TYPES, LoadParams
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.terms import Term
from a3b_gguf.units import GIB

DEFAULT_CTX = 32768
DEFAULT_MARGIN = GIB
RAM_RESERVE = GIB  # kept free in RAM, whatever the margin on the GPUs: a machine that swaps answers nobody
MAX_SEQ = 256  # LLAMA_MAX_SEQ, src/llama-cparams.h


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user asks for; None and "auto" leave the choice to the planner.

    n_ctx: tokens that all slots share. kv_type: "auto", a name of KV_TYPES, or "K/V" for two. n_cpu_moe: layers whose routed
    experts stay in RAM, counted from the first, like --n-cpu-moe of llama.cpp. margin: bytes left free on every GPU.
    """

    n_ctx: int | None = None
    n_parallel: int = 1
    kv_type: str = "auto"
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    margin: int = DEFAULT_MARGIN

    def __post_init__(self) -> None:
        if not 1 <= self.n_parallel <= MAX_SEQ:
            hint = "each slot answers one request at a time"
            raise UsageError(f"--parallel: {self.n_parallel} slots, llama.cpp takes 1 to {MAX_SEQ}", hint)
        for flag, value in (("--n-gpu-layers", self.n_gpu_layers), ("--n-cpu-moe", self.n_cpu_moe)):
            if value is not None and value < 0:
                raise UsageError(f"{flag}: {value} is less than 0", "leave the flag out to let the planner decide")
        kv_types(self.kv_type)


@dataclass(frozen=True, slots=True)
class Reason:
    """One choice in one line of plain English."""

    choice: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What a memory has and what the plan takes of it. reserve: bytes that stay free on purpose."""

    device: str
    total: int
    available: int
    reserve: int
    need: int

    @property
    def left(self) -> int:
        """Bytes that stay free, the reserve among them; negative when the plan does not fit."""
        return self.available - self.need

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 when it fits, or when nothing is asked of this memory."""
        return max(0, self.need - (self.available - self.reserve)) if self.need else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on a machine: where everything goes, how many bytes that takes, why, and how to load it."""

    facts: Facts
    machine: Machine
    wishes: Wishes
    placement: Placement
    terms: tuple[Term, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]
    load: LoadParams

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """RAM first, then each GPU."""
        return budgets(self.terms, self.machine, self.wishes.margin)


def budgets(terms: tuple[Term, ...], machine: Machine, margin: int) -> tuple[Budget, ...]:
    """Need against have for every memory of `machine`. What a GPU without memory of its own takes counts for RAM too."""
    need = {device: sum(t.n_bytes for t in terms if t.device == device) for device in (HOST, *(g.name for g in machine.gpus))}
    need[HOST] += sum(need[g.name] for g in machine.gpus if g.shares_ram)
    ram = Budget(HOST, machine.ram_total, machine.ram_available, min(RAM_RESERVE, machine.ram_available // 4), need[HOST])
    return ram, *(Budget(g.name, g.total, g.free, margin, need[g.name]) for g in machine.gpus)


def kv_types(text: str) -> tuple[str, str] | None:
    """K and V types of "q8_0" or "q8_0/q4_0"; None for "auto". Raises UsageError that lists the names."""
    if text == "auto":
        return None
    k, slash, v = text.lower().partition("/")
    pair = (k, v if slash else k)
    for name in pair:
        if name not in KV_TYPES:
            raise UsageError(f"--kv-type: there is no KV cache type {name!r}", f"known: auto, {', '.join(KV_TYPES)}, or two as K/V")
    return pair
