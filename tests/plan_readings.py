"""Published logs and readings, and what the planner says of the same setups. Used by bench_plan.py and tests/test_plan_readings.py."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from a3b_gguf import gpus
from a3b_gguf.errors import AnswerIsNo
from a3b_gguf.flows.plan_facts import read_facts
from a3b_gguf.machine import Device, Machine, ram_bandwidth, with_ram
from a3b_gguf.memory.cache import f16_copies
from a3b_gguf.memory.compute import in_ram, replayed
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.placement import HOST, Placement, place
from a3b_gguf.memory.settings import Settings, padded
from a3b_gguf.memory.terms import all_terms
from a3b_gguf.memory.widths import widths_of
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.speed import active_bytes, gpu_bandwidth, predict
from a3b_gguf.planner.speed import ram_bandwidth as speed_of_ram
from a3b_gguf.units import GIB, MIB

FILE = Path(__file__).with_name("plan_readings.toml")
WEIGHTS = ("token embedding", "routed experts", "attention, dense and norms", "output")
COMPUTE = ("compute buffer", "staging of experts", "f16 copy of one layer's cache")
NAMES = {"35b": ("qwen3.6", "iq4_nl"), "30b, f16": ("qwen3-30b", "f16")}
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
    backend = "Vulkan" if "old-cuda" in build else row.get("backend", "CUDA")  # which keeps nothing of its own in the compute buffer
    settings = Settings(n_ctx, slots, n_ubatch, n_ubatch if "all-logits" in build else slots, kv, kv, use_mmap=False)
    card = Device(f"{backend}0", 24 * GIB, 24 * GIB)
    placement = place(facts.n_layer_all, (card,), facts.n_layer_all + 1)
    first = facts.n_layer if row.get("experts") == "RAM" else row.get("n_cpu_moe", 0)
    placement = placement.with_cpu_experts(range(first))
    if row.get("output") == "RAM":
        placement = replace(placement, output=HOST)
    found = {(term.name, term.device): term.n_bytes for term in all_terms(facts, (card,), placement, settings)}
    host, mask = found["compute buffer", HOST], 2 * n_ctx * n_ubatch
    compute = compute_buffer(facts, placement, settings, row)
    if "f32-mask" in build:  # the mask twice as large, and beside it for a moment its f16 copy, queries and gates
        host, compute = host + mask, max(compute, 3 * mask + 4 * n_ubatch * (4 * facts.n_head * facts.k_dim + 4 * facts.n_embd))
    if "all-logits" in build:
        compute = max(compute, all_logits(facts, n_ubatch))
    on_card = sum(n for (name, device), n in found.items() if device == card.name and name in WEIGHTS)
    return {
        "KV cache": found["KV cache", card.name] / MIB,
        "recurrent state": found.get(("recurrent state", card.name), 0) / MIB,
        "cache and state": (found["KV cache", card.name] + found.get(("recurrent state", card.name), 0)) / MIB,
        "weights": on_card / MIB,
        "weights in RAM": (sum(n for (name, device), n in found.items() if device == HOST and name in WEIGHTS) + on_card) / MIB,
        "output buffer": 4 * facts.n_vocab * slots / MIB,
        "token embedding": facts.embedding_bytes / MIB,
        "compute": compute / MIB,
        "host compute": host / MIB,
        "f16 copy of one layer's cache": pooled_copies(facts, settings) / MIB,
    }


def compute_buffer(facts: Facts, placement: Placement, settings: Settings, row: dict[str, Any]) -> int:
    """The replay of a build that kept nothing of CUDA's own in it. output in RAM: a GPU that computes all logits copies it."""
    output = (("output", facts.output_bytes),) if row.get("output") == "RAM" else ()
    return replayed(widths_of(facts, settings, facts.layers), True, (*in_ram(facts, placement), *output)).device


def pooled_copies(facts: Facts, settings: Settings) -> int:
    """K and V of one layer as f16: until pull 23907 they lay in a pool of CUDA's, beside the compute buffer."""
    return max(layer.n_head_kv for layer in facts.layers) * sum(f16_copies(facts, settings, "CUDA"))


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


@dataclass(frozen=True, slots=True)
class Parts:
    """What the seconds of one decoded token are made of: bytes over full bandwidths, layers, and layers whose experts are in RAM."""

    id: str
    machine: str
    on_card: float
    in_ram: float
    layers: int
    crossings: int
    decode: float

    def seconds(self, shares: Shares) -> float:
        of_card, of_ram, layer, crossing = shares
        return self.on_card / of_card + self.in_ram / of_ram + self.layers * layer + self.crossings * crossing


Shares = tuple[float, float, float, float]  # of the card's bandwidth, of RAM's; seconds a layer, and more where its experts are in RAM


def parts(row: dict[str, Any]) -> Parts:
    facts, machine = sized(model("35b"), row), machine_of(row)
    card = machine.gpus[0]
    here = place(facts.n_layer_all, (card,), facts.n_layer_all + 1).with_cpu_experts(range(row["n_cpu_moe"]))
    found = active_bytes(facts, here)
    states = sum(2 * 4 * facts.ssm_state for layer in facts.layers if layer.recurrent)
    on_card, in_ram = (found[card.name] + states) / gpu_bandwidth(card), found[HOST] / speed_of_ram(machine)
    return Parts(row["id"], row["machine"], on_card, in_ram, facts.n_layer, len(here.cpu_experts), row["decode"])


def fitted(rows: Sequence[Parts]) -> Shares:
    """The shares, of a coarse grid, with the least squares of logarithms."""
    grid = itertools.product(
        (0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9), (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        (0.0, 20e-6, 40e-6, 55e-6, 80e-6, 100e-6, 120e-6), (0.0, 60e-6, 100e-6, 140e-6, 180e-6, 240e-6, 300e-6),
    )  # fmt: skip
    return min(grid, key=lambda shares: sum(math.log(row.seconds(shares) * row.decode) ** 2 for row in rows))


def held_out() -> Iterator[Compared]:
    """Each machine's readings, predicted with shares that were fitted to the readings of the other machines."""
    rows = [parts(row) for row in table()["reading"] if "decode" in row]
    for name in dict.fromkeys(row.machine for row in rows):
        shares = fitted([row for row in rows if row.machine != name])
        for row in rows:
            if row.machine == name:
                yield Compared(row.id, "tokens/s", row.decode, 1 / row.seconds(shares))


def card_mib(made: Plan, row: dict[str, Any]) -> float:
    """The whole card: what was there before, and the plan's terms; older builds held logits of every row."""
    card = made.budgets[1]
    n_bytes = card.total - card.available + card.need
    if "all-logits" in row.get("build", ()):
        rows = all_logits(made.facts, row["n_ubatch"])
        settings = Settings(made.load.n_ctx, kv_type_k=made.load.kv_type_k, kv_type_v=made.load.kv_type_v)
        now = sum(t.n_bytes for t in made.terms if t.device == card.device and t.name in COMPUTE)
        n_bytes += rows + pooled_copies(made.facts, settings) - now
    return n_bytes / MIB
