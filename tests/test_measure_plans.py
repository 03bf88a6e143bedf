"""--measure: neighbours of a plan, the fastest that leaves its margin, and what is remembered of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from a3b_gguf.errors import AnswerIsNo, BadInput, MachineLacks
from a3b_gguf.flows.measure import measure_plans, recall, remember, remembered
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.llama.params import LoadParams, params_of
from a3b_gguf.llama.timing import Timing, time_model
from a3b_gguf.machine import Device, Machine
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.candidates import candidates
from a3b_gguf.planner.plan import Wishes
from a3b_gguf.units import GIB
from true_header import sparse_35b

CARD = Machine(64 * GIB, 60 * GIB, 8, (Device("CUDA0", 12 * GIB, 11 * GIB, bandwidth=360e9),), ram_bandwidth=50e9)
CPU = Machine(16 * GIB, 12 * GIB, 2)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return read_facts(sparse_35b(tmp_path_factory.mktemp("sparse") / "m-iq4_nl.gguf", "iq4_nl"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def silent(done: int, of: int) -> None:
    pass


def test_neighbours_differ_and_fit(facts: Facts) -> None:
    found = candidates(facts, CARD, Wishes(n_ctx=32768), 8)
    assert len({plan.load for plan in found}) == len(found) == 8
    assert all(not budget.short for plan in found for budget in plan.budgets)
    assert found[0].load == candidates(facts, CARD, Wishes(n_ctx=32768), 1)[0].load
    assert len({plan.load.n_ubatch for plan in found}) > 1
    assert len({len(plan.load.cpu_expert_layers) for plan in candidates(facts, CARD, Wishes(n_ctx=32768), 99)}) > 2


def test_what_was_asked_for_is_not_varied(facts: Facts) -> None:
    asked = Wishes(n_ctx=32768, n_cpu_moe=30, n_ubatch=512)
    for plan in candidates(facts, CARD, asked, 99):
        assert (len(plan.load.cpu_expert_layers), plan.load.n_ubatch, plan.load.n_ctx) == (30, 512, 32768)


def test_the_fastest_with_its_margin_is_kept_and_remembered(facts: Facts) -> None:
    wishes = Wishes(n_ctx=32768)
    plans = candidates(facts, CARD, wishes, 4)
    fast, full, broken = plans[2].load, plans[1].load, plans[3].load

    def clock(path: Path, load: LoadParams) -> Timing:
        if load == broken:
            raise MachineLacks("out of memory")
        speed = {full: 900.0, fast: 500.0}.get(load, 100.0)
        return Timing(speed, speed / 10, 1.0, (("CUDA0", GIB // 2 if load == full else 2 * GIB),))

    told: list[tuple[int, int]] = []
    choice = measure_plans(facts, wishes, CARD, 4, lambda done, of: told.append((done, of)), clock)
    assert choice.plan.load == fast
    assert "fastest of 4" in choice.plan.reasons[-1].why
    assert [(each.fits, bool(each.timing)) for each in choice.measured] == [(True, True), (False, True), (True, True), (False, False)]
    assert "512.00 MiB" in choice.measured[1].note
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    again = remembered(facts, wishes, CARD)
    assert again is not None
    assert again.load == fast
    assert again.reasons[-1].value == "remembered"
    assert remembered(facts, replace(wishes, n_ctx=16384), CARD) is None
    assert remembered(facts, wishes, replace(CARD, n_cores=4)) is None
    assert remembered(facts, wishes, replace(CARD, described=True)) is None


def test_nothing_that_runs_is_said(facts: Facts) -> None:
    def clock(path: Path, load: LoadParams) -> Timing:
        raise MachineLacks("out of memory")

    with pytest.raises(AnswerIsNo, match="out of memory"):
        measure_plans(facts, Wishes(n_ctx=4096), CARD, 2, silent, clock)
    with pytest.raises(MachineLacks, match="described"):
        measure_plans(facts, Wishes(n_ctx=4096), replace(CARD, described=True), 2, silent, clock)


def test_what_is_kept_survives_damage(tmp_path: Path) -> None:
    file, load = tmp_path / "a" / "measured.json", LoadParams(512, tensor_overrides=(("x", "CPU"),), tensor_split=(1.0, 2.0))
    remember(file, "one", load)
    remember(file, "two", replace(load, n_ctx=1024))
    assert recall(file, "one") == load
    assert recall(file, "three") is None
    for damage in ("", "[]", '{"one": 3}', '{"one": {}}'):
        file.write_text(damage)
        assert recall(file, "one") is None
    remember(file, "one", load)
    assert recall(file, "one") == load
    with pytest.raises(BadInput, match="cannot be kept"):
        remember(file / "below" / "x.json", "one", load)


def test_parameters_survive_json() -> None:
    load = LoadParams(512, cpu_expert_layers=(1, 2), tensor_overrides=(("a", "CPU"),), tensor_split=(0.5,))
    assert params_of(json.loads(json.dumps(asdict(load)))) == load


def test_the_embedded_model_is_really_timed(tiny_bf16: Path) -> None:
    timing = time_model(tiny_bf16, LoadParams(n_ctx=1024, n_threads=1, n_threads_batch=1))
    assert timing.prefill > timing.decode > 1
    assert timing.free == ()
    with pytest.raises(BadInput):
        time_model(tiny_bf16.with_name("missing.gguf"), LoadParams(n_ctx=512))
