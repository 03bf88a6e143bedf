"""What is asked of the planner and what it answers: wishes in, a plan with every byte and every reason out."""

from __future__ import annotations

from dataclasses import dataclass

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.params import KV_TYPES, LoadParams
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.term import Term
from a3b_gguf.planner.speed import Speed
from a3b_gguf.units import GIB

DEFAULT_CTX = 32768
DEFAULT_MARGIN = GIB
RAM_RESERVE = GIB  # kept free in RAM, whatever the margin on the GPUs: a machine that swaps answers nobody
MAX_SEQ = 256  # LLAMA_MAX_SEQ, src/llama-cparams.h
MAX_DRAFT = 16
UBATCHES = (32, 8192)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user asks for; None and "auto" leave the choice to the planner.

    n_ctx: tokens that all slots share; n_ctx_slot: tokens of each slot, in a cache of its own, instead. kv_type: "auto", a name of
    KV_TYPES, or "K/V" for two. n_cpu_moe: layers whose routed experts stay in RAM, counted from the first, like --n-cpu-moe of llama.cpp.
    margin: bytes left free on every GPU. n_draft: tokens guessed ahead in each step. checkpoint_bytes: RAM for copies of recurrent
    states; text_bytes: for texts whose slot another request took. kv_split: each slot has its own share of the cache, so that an answer
    does not depend on what else runs.
    """

    n_ctx: int | None = None
    n_parallel: int = 1
    kv_type: str = "auto"
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    margin: int = DEFAULT_MARGIN
    n_ubatch: int | None = None
    n_draft: int = 0
    checkpoint_bytes: int | None = None
    text_bytes: int | None = None
    kv_split: bool = False
    n_ctx_slot: int | None = None

    def __post_init__(self) -> None:
        if self.n_ctx is not None and self.n_ctx_slot is not None:
            raise UsageError("--ctx and --ctx-per-slot both say how much context there is", "give one of them")
        if not 1 <= self.n_parallel <= MAX_SEQ:
            hint = "each slot answers one request at a time"
            raise UsageError(f"--parallel: {self.n_parallel} slots, llama.cpp takes 1 to {MAX_SEQ}", hint)
        for flag, value in (("--n-gpu-layers", self.n_gpu_layers), ("--n-cpu-moe", self.n_cpu_moe)):
            if value is not None and value < 0:
                raise UsageError(f"{flag}: {value} is less than 0", "leave the flag out to let the planner decide")
        if not 0 <= self.n_draft <= MAX_DRAFT:
            raise UsageError(f"--draft: {self.n_draft} tokens, expected 0 to {MAX_DRAFT}", "1 to 3 are sensible; 0 drafts nothing")
        if self.n_ubatch is not None and not UBATCHES[0] <= self.n_ubatch <= UBATCHES[1]:
            raise UsageError(f"--ubatch: {self.n_ubatch} tokens, expected {UBATCHES[0]} to {UBATCHES[1]}", "leave the flag out")
        kv_types(self.kv_type)

    @property
    def by_hand(self) -> bool:
        return self.n_gpu_layers is not None or self.n_cpu_moe is not None


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
    def room(self) -> int:
        """Bytes that could be taken without touching the reserve; negative when some are missing."""
        return self.left - self.reserve

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 when it fits, or when nothing is asked of this memory."""
        return max(0, -self.room) if self.need else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on a machine: where everything goes, how many bytes that takes, why, how fast it is, and how to load it.

    environment: variables that llama.cpp reads when its process starts.
    """

    facts: Facts
    machine: Machine
    wishes: Wishes
    placement: Placement
    terms: tuple[Term, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]
    load: LoadParams
    speed: Speed
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """RAM first, then each GPU."""
        return budgets(self.terms, self.machine, self.wishes.margin)


def budgets(terms: tuple[Term, ...], machine: Machine, margin: int) -> tuple[Budget, ...]:
    """Need against have for every memory of `machine`. What a GPU without memory of its own takes counts for RAM too."""
    need = dict.fromkeys((HOST, *(gpu.name for gpu in machine.gpus)), 0)
    for term in terms:
        need[term.device] += term.n_bytes
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
