"""A plan is tried on llama.cpp's allocator before anything is loaded, and planned once more when that disagrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3b_gguf.errors import BadInput, MachineLacks
from a3b_gguf.flows.checked_plan import checked_plan, corrected
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.llama.buffers import Buffer
from a3b_gguf.llama.dry_run import DryRun
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.machine import Machine, with_ram, with_vram
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.check import Check, Row, compare
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.units import GIB, MIB
from true_header import sparse_35b

HERE = Machine(ram_total=16 * GIB, ram_available=12 * GIB, n_cores=2)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_35b(tmp_path_factory.mktemp("sparse") / "m-iq4_nl.gguf", "iq4_nl")


def as_planned(plan: Plan, extra: dict[str, int]) -> DryRun:
    """What llama.cpp would say if it took what was planned, and `extra` of compute on a device."""
    rows = compare(plan, [Buffer("model", "CPU", 1)]).rows
    planned = [Buffer(row.kind, "CPU" if row.device == HOST else row.device, row.predicted) for row in rows]
    return DryRun((*planned, *(Buffer("compute", device, size) for device, size in extra.items())), 4096, True)


def test_the_embedded_model_is_as_planned(tiny_bf16: Path) -> None:
    checked = checked_plan(read_facts(tiny_bf16), Wishes(n_ctx=8192, n_parallel=2), HERE)
    assert checked.check is not None
    assert checked.check.agrees
    assert checked.notes == ()
    for row in checked.check.rows:
        assert abs(row.difference) < 0.02 * row.predicted + MIB, row
    assert {row.kind for row in checked.check.rows} == {"model", "context", "compute", "output"}


def test_a_35b_is_as_planned_to_the_mib(sparse: Path) -> None:
    machine = with_ram(HERE, 64 * GIB)
    checked = checked_plan(read_facts(sparse), Wishes(n_ctx=65536, kv_type="q8_0"), machine)
    assert checked.check is not None
    by_kind = {row.kind: row for row in checked.check.rows}
    assert abs(by_kind["context"].difference) < 0.01 * MIB
    assert abs(by_kind["model"].difference) < 1 * MIB
    assert abs(by_kind["compute"].difference) <= 0.02 * by_kind["compute"].predicted


def test_a_disagreement_is_planned_once_more(tiny_bf16: Path) -> None:
    asked: list[LoadParams] = []

    def greedy(path: Path, load: LoadParams) -> DryRun:
        asked.append(load)
        return as_planned(checked_plan(facts, wishes, HERE, lambda p, q: as_planned_of[0]).plan, {"CPU": 100 * MIB})

    facts, wishes = read_facts(tiny_bf16), Wishes(n_ctx=4096)
    as_planned_of = [DryRun((), 0, True)]
    first = checked_plan(facts, wishes, HERE, greedy)
    assert len(asked) == 2
    assert first.check is not None
    assert first.check.differences[HOST] == 100 * MIB
    assert not first.check.agrees
    assert "planned once more" in first.notes[0]
    assert "100.00 MiB" in first.notes[0]


def test_what_llama_cpp_takes_is_what_the_second_plan_has_not(sparse: Path) -> None:
    machine = with_vram(with_ram(HERE, 64 * GIB), (16 * GIB,))
    check = Check((Row("compute", "GPU0", 100 * MIB, 300 * MIB), Row("compute", HOST, 50 * MIB, 20 * MIB)))
    changed = corrected(machine, check)
    assert changed.gpus[0].free == machine.gpus[0].free - 200 * MIB
    assert changed.ram_available == machine.ram_available + 30 * MIB
    assert not check.agrees
    assert Check((Row("compute", HOST, 1000 * MIB, 1015 * MIB),)).agrees
    assert Check((Row("compute", HOST, 2000 * MIB, 2039 * MIB),)).agrees
    assert not Check((Row("compute", HOST, 2000 * MIB, 2041 * MIB),)).agrees


def test_described_gpus_cannot_be_asked(sparse: Path) -> None:
    machine = with_vram(with_ram(HERE, 64 * GIB), (16 * GIB,))

    def never(path: Path, load: LoadParams) -> DryRun:
        raise AssertionError("asked")

    checked = checked_plan(read_facts(sparse), Wishes(n_ctx=4096), machine, never)
    assert checked.check is None
    assert "described" in checked.notes[0]


def test_a_dry_run_that_cannot_be_is_a_note_but_a_broken_file_is_not(tiny_bf16: Path) -> None:
    def lacks(path: Path, load: LoadParams) -> DryRun:
        raise MachineLacks("llama.cpp ended the dry run")

    def broken(path: Path, load: LoadParams) -> DryRun:
        raise BadInput("missing tensor")

    facts = read_facts(tiny_bf16)
    assert checked_plan(facts, Wishes(n_ctx=4096), HERE, lacks).notes == ("no dry run: llama.cpp ended the dry run",)
    with pytest.raises(BadInput, match="missing tensor"):
        checked_plan(facts, Wishes(n_ctx=4096), HERE, broken)


def test_a_log_without_weights_is_compared_without_them(tiny_bf16: Path) -> None:
    plan = checked_plan(read_facts(tiny_bf16), Wishes(n_ctx=4096), HERE, lambda path, load: DryRun((), 0, False)).plan
    rows = compare(plan, [Buffer("kv", "CPU", 3), Buffer("recurrent", "CPU_Mapped", 4), Buffer("compute", "CUDA_Host", 5)]).rows
    assert [(row.kind, row.device, row.found) for row in rows] == [("context", HOST, 7), ("compute", HOST, 5), ("output", HOST, 0)]
