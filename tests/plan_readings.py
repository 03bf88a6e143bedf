"""Published logs and readings, and what the planner says of the same setups. Used by bench_plan.py and tests/test_plan_readings.py."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from a3b_gguf import gpus
from a3b_gguf.errors import AnswerIsNo
from a3b_gguf.flows.plan_facts import read_facts
from a3b_gguf.machine import Device, Machine, ram_bandwidth, with_ram
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.placement import HOST, place
from a3b_gguf.memory.settings import Settings, padded
from a3b_gguf.memory.terms import all_terms
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.speed import predict
from a3b_gguf.units import GIB, MIB

FILE = Path(__file__).with_name("plan_readings.toml")
CARD = "CUDA0"
NAMES = {"35b": ("qwen3.6", "iq4_nl"), "30b": ("qwen3-30b", "q4_k_m")}
EXACT = 0.01  # of a buffer that llama.cpp prints
CLOSE, CLOSE_BYTES = 0.05, 400 * MIB  # of a whole card
SPEED = 0.35


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of a log or a reading, in MiB or tokens a second."""

    id: str
    what: str
    published: float
    predicted: float

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1


def table() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def model(name: str) -> Facts:
    """Qwen3.6-35B-A3B or Qwen3-30B-A3B by the catalog, without MTP block."""
    return replace(read_facts(Path(NAMES[name][0]), NAMES[name][1]), nextn=(), notes=())


def sized(facts: Facts, row: dict[str, Any]) -> Facts:
    """`facts` with the sizes that a row gives, in MiB, the same for every layer."""

    def layer(old: Layer) -> Layer:
        largest = int(row["largest_mib"] * MIB)
        rest = (int(row["expert_mib"] * MIB) - largest) // 2 if "expert_mib" in row else largest
        sizes = (("ffn_gate_exps", rest), ("ffn_up_exps", rest), ("ffn_down_exps", largest))
        if "dense_mib" not in row:
            return replace(old, expert_tensors=sizes)
        return replace(old, expert_tensors=sizes, dense=int(row["dense_mib"] * MIB) // facts.n_layer, norms=0)

    if "embedding_mib" in row:
        facts = replace(facts, embedding_bytes=int(row["embedding_mib"] * MIB))
    if "dense_mib" in row:
        facts = replace(facts, output_bytes=1, other_bytes=0)  # the output is in dense_mib
    return replace(facts, layers=tuple(map(layer, facts.layers))) if "largest_mib" in row else facts


def log_terms(row: dict[str, Any]) -> dict[str, float]:
    """What our formulas say of one log's setup, in MiB, with what older builds did otherwise."""
    facts, n_ctx, n_ubatch, slots = sized(model(row["model"]), row), padded(row["n_ctx"]), row.get("n_ubatch", 512), row.get("slots", 1)
    build, kv = row.get("build", ()), row.get("kv", "f16")
    settings = Settings(n_ctx, slots, n_ubatch, n_ubatch if "all-logits" in build else slots, kv, kv, use_mmap=False)
    card = Device(CARD, 24 * GIB, 24 * GIB)
    placement = place(facts.n_layer_all, (card,), facts.n_layer_all + 1)
    if row.get("experts") == "RAM":
        placement = placement.with_cpu_experts(range(facts.n_layer))
    found = {(term.name, term.device): term.n_bytes for term in all_terms(facts, (card,), placement, settings)}
    host, mask = found["compute buffer", HOST], 2 * n_ctx * n_ubatch
    compute = found["compute buffer", CARD] + found.get(("staging of experts", CARD), 0)
    if "f32-mask" in build:  # the mask twice as large, and beside it for a moment its f16 copy, queries and gates
        host, compute = host + mask, max(compute, 3 * mask + 4 * n_ubatch * (4 * facts.n_head * facts.k_dim + 4 * facts.n_embd))
    if "all-logits" in build:
        compute = max(compute, all_logits(facts, n_ubatch)) if row["model"] == "30b" else all_logits(facts, n_ubatch)
    return {
        "KV cache": found["KV cache", CARD] / MIB,
        "recurrent state": found.get(("recurrent state", CARD), 0) / MIB,
        "cache and state": (found["KV cache", CARD] + found.get(("recurrent state", CARD), 0)) / MIB,
        "output buffer": 4 * facts.n_vocab * slots / MIB,
        "token embedding": facts.embedding_bytes / MIB,
        "compute": compute / MIB,
        "host compute": host / MIB,
        "f16 copy of one layer's cache": found.get(("f16 copy of one layer's cache", CARD), 0) / MIB,
    }


def all_logits(facts: Facts, n_ubatch: int) -> int:
    """What older builds held for the logits of every row, beside the last layer's output and its norm."""
    return 4 * n_ubatch * (facts.n_vocab + 2 * facts.n_embd)


def logs() -> Iterator[Compared]:
    for row in table()["log"]:
        found = log_terms(row)
        for what, published in row["expect"].items():
            yield Compared(row["id"], what, published, found[what])


def machine_of(row: dict[str, Any]) -> Machine:
    """The machine of a reading, as flags would describe it."""
    named = next(machine for machine in table()["machine"] if machine["name"] == row["machine"])
    card = gpus.devices((gpus.find(named["gpu"]),), 0)[0]
    total = named["total_mib"] * MIB
    name = f"{named.get('backend', 'CUDA')}0"
    card = replace(card, name=name, total=total, free=total - named["before_mib"] * MIB)
    bare = Machine(0, 0, named["cores"], (card,), True, system="Linux")
    return replace(with_ram(bare, named["ram_gib"] * GIB), ram_bandwidth=ram_bandwidth(named["ram"]))


@dataclass(frozen=True, slots=True)
class Judged:
    """A reading and what the plan for it says. verdict: "fits", "tight" (planned with a warning about the margin) or "refused"."""

    id: str
    outcome: str
    verdict: str
    vram: Compared | None
    decode: Compared | None

    @property
    def wrong_fit(self) -> bool:
        return self.outcome != "works" and self.verdict == "fits"

    @property
    def wrong_refusal(self) -> bool:
        return self.outcome == "works" and self.verdict == "refused"


def readings() -> Iterator[Judged]:
    for row in table()["reading"]:
        yield judged(row)


def judged(row: dict[str, Any]) -> Judged:
    facts, machine = sized(model("35b"), row), machine_of(row)
    wishes = Wishes(n_ctx=row["n_ctx"], n_parallel=row["slots"], kv_type=row["kv"], n_cpu_moe=row["n_cpu_moe"], n_ubatch=row["n_ubatch"])
    try:
        made = plan(facts, machine, wishes)
    except AnswerIsNo:
        return Judged(row["id"], row["outcome"], "refused", None, None)
    verdict = "tight" if any("stay free" in warning for warning in made.warnings) else "fits"
    vram = Compared(row["id"], "VRAM", row["vram_mib"], card_mib(made, row)) if "vram_mib" in row else None
    speed = predict(facts, machine, made.placement, Settings(row["n_ctx"], kv_type_k=row["kv"], kv_type_v=row["kv"]))
    decode = Compared(row["id"], "tokens/s", row["decode"], speed.decode.middle) if "decode" in row else None
    return Judged(row["id"], row["outcome"], verdict, vram, decode)


def card_mib(made: Plan, row: dict[str, Any]) -> float:
    """The whole card: what was there before, and the plan's terms; older builds held logits of every row."""
    card = made.budgets[1]
    n_bytes = card.total - card.available + card.need
    if "all-logits" in row.get("build", ()):
        rows = all_logits(made.facts, row["n_ubatch"])
        now = sum(t.n_bytes for t in made.terms if t.device == card.device and t.name in ("compute buffer", "staging of experts"))
        n_bytes += max(0, rows - now)
    return n_bytes / MIB
