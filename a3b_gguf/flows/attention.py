"""How fast this machine's processor computes the attention of a model, measured once and remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from a3b_gguf.errors import MachineLacks
from a3b_gguf.machine import AttentionCost, Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.settings import padded
from a3b_gguf.openmp import spin_defaults
from a3b_gguf.planner.plan import DEFAULT_CTX, Wishes
from a3b_gguf.probe.bandwidth import KEPT_SECONDS, KEPT_WHEN_BUSY_SECONDS, is_busy
from a3b_gguf.user_cache import cache_folder, keep_text

MODULE = "a3b_gguf.llama.attention"  # in a process of its own: loading llama.cpp takes longer than planning
PATIENCE_SECONDS = 60
LONGEST = 2048  # tokens of the text that is measured: of longer ones attention only grows


@dataclass(frozen=True, slots=True)
class Question:
    """Which attention is asked about. heads: as `a3b_gguf.llama.attention.Heads`. n_ctx: tokens of the cache; n_kv: of the text in it."""

    heads: dict[str, int]
    n_ctx: int
    n_kv: int
    n_threads: int


def with_attention(facts: Facts, wishes: Wishes, machine: Machine) -> Machine:
    """`machine` with what attention of the model takes on its processor; as it is where it is described, or where that decides nothing."""
    asked = question(facts, wishes, machine)
    shares_cache = wishes.n_parallel > 1 and not wishes.kv_split and wishes.n_ctx_slot is None
    if machine.described or machine.gpus or shares_cache or asked is None:
        return machine
    file = cache_folder() / f"attention-{_key(asked)}.json"
    cost = recall(file)
    if cost is not None:
        return replace(machine, attention=cost)
    busy = is_busy()
    try:
        cost = measured(asked)
    except MachineLacks as error:
        return replace(machine, notes=(*machine.notes, error.message))
    return replace(machine, attention=cost, notes=(*machine.notes, *remember(file, cost, KEPT_WHEN_BUSY_SECONDS if busy else KEPT_SECONDS)))


def question(facts: Facts, wishes: Wishes, machine: Machine) -> Question | None:
    """What to measure: half of the context of a slot, at most LONGEST tokens. None for a model without attention."""
    layers = [layer for layer in facts.layers if layer.n_head_kv]
    if not layers:
        return None
    asked = wishes.n_ctx_slot or (wishes.n_ctx or DEFAULT_CTX) // (wishes.n_parallel if wishes.kv_split else 1)
    n_ctx = padded(min(asked, facts.n_ctx_train))
    n_kv = max(256, min(n_ctx // 2, LONGEST) // 256 * 256)
    heads = {
        "n_layer": len(layers), "n_head": facts.n_head, "n_head_kv": max(layer.n_head_kv for layer in layers), "k_dim": facts.k_dim,
        "v_dim": facts.v_dim,
    }  # fmt: skip
    return Question(heads, max(n_kv, min(n_ctx, 2 * LONGEST)), n_kv, machine.n_cores)


def measured(asked: Question) -> AttentionCost:
    """Takes a second. Raises MachineLacks when the process ends without an answer."""
    environment = {**os.environ, **spin_defaults(os.environ), "GGML_NO_BACKTRACE": "1"}
    given = json.dumps(asdict(asked))
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=given,
            capture_output=True,
            text=True,
            env=environment,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        return cost_of({"n_kv": asked.n_kv, **json.loads(done.stdout)})
    except (subprocess.SubprocessError, ValueError, KeyError) as error:
        raise MachineLacks(f"attention could not be measured on this machine: {error}", "the plan does without") from error


def cost_of(told: dict[str, Any]) -> AttentionCost:
    """Raises KeyError, TypeError or ValueError for anything that is none."""
    (write, write_without), (read, read_without) = told["write"], told["read"]
    values = [float(value) for value in (write, write_without, read, read_without)]
    if not all(0 < value < PATIENCE_SECONDS for value in values):
        raise ValueError(f"seconds of attention: {values}")
    return AttentionCost(int(told["n_kv"]), (values[0], values[1]), (values[2], values[3]))


def recall(file: Path) -> AttentionCost | None:
    """The measurement in `file`, unless it is too old or not readable: then it is taken again."""
    try:
        held = json.loads(file.read_text())
        return cost_of(held) if 0 <= held["until"] - time.time() <= KEPT_SECONDS else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(file: Path, cost: AttentionCost, seconds: float) -> tuple[str, ...]:
    """Keeps a measurement for so long; a note when that is not possible."""
    try:
        keep_text(file, json.dumps({**asdict(cost), "until": time.time() + seconds}))
    except OSError as error:
        return (f"attention is measured each time: {file} cannot be written ({error.strerror})",)
    return ()


def _key(asked: Question) -> str:
    """Tells one question and one machine from another: a home folder may be shared by several."""
    parts = [asdict(asked), platform.node(), platform.machine(), platform.processor(), version("llama-cpp-python")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
