"""A plan for a model file: reads its header, measures the machine when none is described, and asks the planner."""

from __future__ import annotations

from pathlib import Path

from a3b_gguf import catalog, probe
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.read import facts_of
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.split import shards


def plan_file(path: Path, wishes: Wishes, machine: Machine | None = None) -> Plan:
    """How to load the model of `path`. machine: None measures the one at hand.

    Raises BadInput for a file that is no model, AnswerIsNo when it does not fit, UsageError for a wish that cannot be.
    """
    return plan(read_facts(path), machine or probe.machine(), wishes)


def read_facts(path: Path) -> Facts:
    """Facts of a GGUF file, of all its parts when it is split."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder, a plan needs the sizes in a .gguf file", f"make one: a3b quantize {path} --type iq4_nl")
    if not path.exists() and (entry := catalog.find(str(path))):
        raise BadInput(
            f"{entry.name} is a model of the catalog, not a file: a plan needs the sizes in its .gguf file",
            f"download the checkpoint from {entry.huggingface or 'its source'}, run `a3b quantize` on it and plan for what that writes",
        )
    first = read_gguf(path)
    kind = "mmproj" if first.get("general.architecture") == "clip" else first.get("general.type", "model")
    if kind != "model":
        raise BadInput(f"{path} is a GGUF file of type {kind!r}, not a model", "give the model's own .gguf file")
    return facts_of(first, shards(first))
