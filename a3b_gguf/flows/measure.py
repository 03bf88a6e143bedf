"""`--measure N`: loads the best few placements in turn, keeps the fastest that leaves its margin, and remembers it.

What is remembered holds for one model file, one machine, one build of llama.cpp and one set of wishes; any other is measured anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from a3b_gguf.errors import AnswerIsNo, BadInput, MachineLacks
from a3b_gguf.flows.plan_facts import read_advice
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.timing import Timing, time_model
from a3b_gguf.machine import Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.candidates import candidates
from a3b_gguf.planner.plan import Plan, Reason, Wishes
from a3b_gguf.planner.speed import TURN_ANSWER, TURN_PROMPT
from a3b_gguf.units import human_bytes
from a3b_gguf.user_cache import cache_folder, keep_text

Clock = Callable[[Path, LoadParams], Timing]
Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """One placement that was loaded. timing: None when it could not be, and then `note` says why. fits: its margin stayed free."""

    plan: Plan
    timing: Timing | None
    fits: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """plan: the fastest; measured: all that were tried, in their order."""

    plan: Plan
    measured: tuple[Measured, ...]


def measure_plans(facts: Facts, wishes: Wishes, machine: Machine, most: int, tell: Tell, clock: Clock = time_model) -> Choice:
    """Raises what planning raises, MachineLacks for GPUs that are only described, and AnswerIsNo when none of the placements runs."""
    if machine.described and machine.gpus:
        raise MachineLacks("--measure loads the model, and the GPUs are only described", "leave --vram and --gpu out")
    advice, _ = read_advice(facts)
    tried = []
    plans = candidates(facts, machine, wishes, most, advice)
    for number, plan in enumerate(plans):
        tell(number, len(plans))
        tried.append(_measured(plan, clock))
    tell(len(plans), len(plans))
    fitting = [each for each in tried if each.timing and each.fits]
    if not fitting:
        raise AnswerIsNo(f"none of {len(tried)} placements ran with its margin: {tried[0].note}", "a larger --margin plans with more air")
    best = min(fitting, key=_turn_seconds)
    remember(cache_file(), key_of(facts, wishes, machine), best.plan.load)
    return Choice(_told(best, len(tried)), tuple(tried))


def _measured(plan: Plan, clock: Clock) -> Measured:
    try:
        timing = clock(plan.facts.path, plan.load)
    except MachineLacks as error:
        return Measured(plan, None, False, error.message)
    margin = plan.wishes.margin
    tight = [f"{name}: only {human_bytes(free)} stayed free" for name, free in timing.free if free < margin and _used(plan, name)]
    return Measured(plan, timing, not tight, "; ".join(tight))


def _used(plan: Plan, device: str) -> bool:
    return any(term.device == device for term in plan.terms)


def _turn_seconds(measured: Measured) -> float:
    assert measured.timing
    return measured.timing.turn_seconds(TURN_PROMPT, TURN_ANSWER)


def _told(best: Measured, of: int) -> Plan:
    assert best.timing
    why = f"the fastest of {of} measured: prompt {best.timing.prefill:,.0f}, answer {best.timing.decode:,.1f} tokens a second"
    return replace(best.plan, reasons=(*best.plan.reasons, Reason("measured", f"{_turn_seconds(best):.1f} s a turn", why)))


def remembered(facts: Facts, wishes: Wishes, machine: Machine, file: Path | None = None) -> Plan | None:
    """The plan that an earlier --measure found best here, or None. Only a plan that the planner would still allow is taken."""
    if machine.described:
        return None
    load = recall(file or cache_file(), key_of(facts, wishes, machine))
    if load is None:
        return None
    advice, _ = read_advice(facts)
    for plan in candidates(facts, machine, wishes, 1000, advice):
        if plan.load == load:
            return replace(plan, reasons=(*plan.reasons, Reason("measured", "remembered", "the fastest when --measure was asked for here")))
    return None


def cache_file() -> Path:
    return cache_folder() / "measured.json"


def key_of(facts: Facts, wishes: Wishes, machine: Machine) -> str:
    """A digest of everything that the best placement depends on."""
    import hashlib
    import platform
    from importlib.metadata import version

    status = facts.path.stat()
    gpus = [(gpu.name, gpu.description, gpu.total) for gpu in machine.gpus]
    parts = [
        str(facts.path.resolve()), status.st_size, status.st_mtime_ns, asdict(wishes), gpus, machine.ram_total, machine.n_cores,
        platform.node(), version("llama-cpp-python"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def recall(file: Path, key: str) -> LoadParams | None:
    """What is kept under `key`; None when nothing is or the file cannot be read."""
    from a3b_gguf.llama.params import params_of

    try:
        held = json.loads(file.read_text())[key]
        return params_of(held)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(file: Path, key: str, load: LoadParams) -> None:
    """Keeps `load` under `key`. Raises BadInput when the folder cannot be written: what was measured would be lost without a word."""
    try:
        held = json.loads(file.read_text())
    except (OSError, ValueError):
        held = {}
    try:
        keep_text(file, json.dumps({**(held if isinstance(held, dict) else {}), key: asdict(load)}))
    except OSError as error:
        hint = "set XDG_CACHE_HOME to a folder that can be written"
        raise BadInput(f"{file}: {error.strerror}; what was measured cannot be kept", hint) from error
