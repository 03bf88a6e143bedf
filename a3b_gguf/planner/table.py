"""How contexts and cache types share one machine: the same plan for every pair, and what each leaves free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from a3b_gguf.clip_bounds import KVAdvice
from a3b_gguf.errors import AnswerIsNo, UsageError
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.decide import without_help
from a3b_gguf.planner.place import on_gpu_of
from a3b_gguf.planner.plan import Plan, Wishes

CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
KV_CHOICES = ("f16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Cell:
    """One context with one cache type. cache: its bytes; need and left: on the first GPU, in RAM where there is none.

    verdict: "fits", "N layers of experts in RAM", "N of M layers on the GPU", "CPU only", "does not fit" or "not possible".
    """

    n_ctx: int
    kv_type: str
    cache: int
    need: int
    left: int
    verdict: str
    decode: float

    @property
    def fits(self) -> bool:
        return self.need > 0


def table(facts: Facts, machine: Machine, wishes: Wishes, advice: KVAdvice | None = None) -> tuple[Cell, ...]:
    """A cell for each context up to what the model was trained for, and each cache type."""
    contexts = [n for n in CONTEXTS if n <= facts.n_ctx_train] or [facts.n_ctx_train]
    asked = [wishes.n_ctx] if wishes.n_ctx and wishes.n_ctx <= facts.n_ctx_train and wishes.n_ctx not in contexts else []
    wanted = sorted([*contexts, *asked])
    return tuple(cell(facts, machine, replace(wishes, n_ctx=n, kv_type=kind), advice) for n in wanted for kind in KV_CHOICES)


def cell(facts: Facts, machine: Machine, wishes: Wishes, advice: KVAdvice | None) -> Cell:
    n_ctx = wishes.n_ctx or 0
    try:
        made = without_help(facts, machine, wishes, advice)
    except AnswerIsNo:
        return Cell(n_ctx, wishes.kv_type, 0, 0, 0, "does not fit", 0.0)
    except UsageError:
        return Cell(n_ctx, wishes.kv_type, 0, 0, 0, "not possible", 0.0)
    cache = sum(term.n_bytes for term in made.terms if term.name == "KV cache")
    budget = made.budgets[1 if made.placement.uses_gpu else 0]
    return Cell(n_ctx, wishes.kv_type, cache, budget.need, budget.left, verdict(made), made.speed.decode.middle)


def verdict(made: Plan) -> str:
    """In the fewest words."""
    here, facts = made.placement, made.facts
    if not here.uses_gpu:
        return "CPU only" if made.machine.gpus else "fits"
    layers, _ = on_gpu_of(facts, here)
    if layers < facts.n_layer:
        return f"{layers} of {facts.n_layer} layers on the GPU"
    held = len({*here.cpu_experts, *(layer for layer, _ in here.cpu_tensors)})
    return f"{held} layers' experts in RAM" if held else "fits"


def devices(cells: Sequence[Cell], machine: Machine) -> str:
    """Whose memory the columns speak of."""
    return machine.gpus[0].name if machine.gpus and any(cell.fits for cell in cells) else HOST
