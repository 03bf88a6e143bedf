"""Plans of the machines that people have, a few lines each: what tests/golden/plans.txt holds for a person to review.

    python tests/plan_summary.py > tests/golden/plans.txt      after reading the difference
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from a3b_gguf import gpus
from a3b_gguf.errors import AnswerIsNo
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.machine import Machine, ram_bandwidth, with_gpus, with_ram
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.refuse import OR
from a3b_gguf.units import GIB
from true_header import sparse_35b

# A common card of each size, with common memory beside it.
CARDS = {8: "RTX 4060", 12: "RTX 3060 12GB", 16: "RTX 4070 Ti SUPER", 24: "RTX 3090"}
RAMS = {16: "DDR4-3200", 32: "DDR5-5600", 64: "DDR5-6000"}
CONTEXTS = (64000, 262144)
TOLD = ("KV type", "experts in RAM", "batch", "checkpoints")


def machine(vram: int, ram: int) -> Machine:
    bare = Machine(0, 0, n_cores=8)
    from_flags = with_gpus(with_ram(bare, ram * GIB), gpus.devices((gpus.find(CARDS[vram]),), ram * GIB))
    return Machine(
        from_flags.ram_total, from_flags.ram_available, 8, from_flags.gpus, True, ram_bandwidth=ram_bandwidth(RAMS[ram]), system="Linux"
    )


def summary(facts: Facts) -> str:
    """All of them as one text."""
    return "\n".join(line for n_ctx in CONTEXTS for vram in CARDS for ram in RAMS for line in lines(facts, n_ctx, vram, ram)) + "\n"


def lines(facts: Facts, n_ctx: int, vram: int, ram: int) -> Iterator[str]:
    yield f"{CARDS[vram]}, {vram} GiB; RAM {ram} GiB of {RAMS[ram]}; {n_ctx:,} tokens"
    try:
        made = plan(facts, machine(vram, ram), Wishes(n_ctx=n_ctx))
    except AnswerIsNo as error:
        yield f"  refused: {error.message.partition(' does not fit: ')[2]}"
        yield from (f"    would fit: {change}" for change in error.hint.split(OR))
    else:
        yield from told(made)
    yield ""


def told(made: Plan) -> Iterator[str]:
    for reason in made.reasons:
        if reason.choice in TOLD:
            yield f"  {reason.choice}: {reason.value} ({reason.why})"
    left = ", ".join(f"{budget.device} {budget.left / GIB:.2f} GiB" for budget in made.budgets)
    speed = made.speed
    rates = f"reads {speed.prefill.low:.0f}-{speed.prefill.high:.0f}, writes {speed.decode.low:.0f}-{speed.decode.high:.0f} tokens/s"
    yield f"  left: {left}; {rates}, {speed.decode_full.low:.0f}-{speed.decode_full.high:.0f} with a full context"
    yield from (f"  warning: {warning}" for warning in made.warnings)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(summary(read_facts(sparse_35b(Path(folder) / "35b.gguf", "iq4_nl"))))
