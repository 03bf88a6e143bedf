"""`a3b quantize --calibration DIR`: measured ranges change types, where nobody chose them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.clip_bounds import read_bounds
from a3b_gguf.errors import AnswerIsNo, BadInput, UsageError
from a3b_gguf.flows.allocate import Target, Weighed, fit_target, weigh
from a3b_gguf.flows.calibrate import Options as CalibrateOptions
from a3b_gguf.flows.calibrate import calibrate_file
from a3b_gguf.flows.quantize import Options, Quantized, plan_quantize
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.model_id import model_id, model_id_of
from a3b_gguf.tensors import TYPES
from a3b_quantize.bounds import write_bounds
from inside import inside as a3b

SAMPLE = Path(__file__).parent.parent / "quantize" / "a3b_quantize" / "sample.txt"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Path:
    options = CalibrateOptions((str(SAMPLE),), n_ctx=64, most_chunks=1, enough=0)
    return calibrate_file(tiny_bf16, tmp_path_factory.mktemp("calibration") / "out", options).folder


@pytest.fixture
def hot(calibration: Path, tmp_path: Path) -> Path:
    """The same with ranges that call for a change: a super expert in layer 2, large sums in what layer 1's experts read."""
    folder = Path(shutil.copytree(calibration, tmp_path / "hot"))
    found = read_bounds(folder / "clip_bounds.bin")
    changed = {(2, "down_out"): {"absmax": 50_000.0}, (1, "ffn_in"): {"sum32": 60_000.0}}
    records = [replace(each, **changed.get((each.layer, each.site), {})) for each in found.records]  # type: ignore[arg-type]
    write_bounds(folder / "clip_bounds.bin", found.header, records)
    return folder


def types(done: Quantized) -> dict[str, int]:
    return {f"{share.role} {share.type}": share.tensors for share in done.shares}


def plan(source: Path, tmp_path: Path, **flags: object) -> Quantized:
    return plan_quantize(source, tmp_path / "out.gguf", Options(**flags))  # type: ignore[arg-type]


def test_ordinary_ranges_change_nothing(tiny_bf16: Path, calibration: Path, tmp_path: Path) -> None:
    with_ranges = plan(tiny_bf16, tmp_path, type_name="q4_k", calibration=calibration)
    assert types(with_ranges) == types(plan(tiny_bf16, tmp_path, type_name="q4_k"))
    assert not [note for note in with_ranges.notes if "ranges" in note]


def test_ranges_change_types_and_say_so(tiny_bf16: Path, hot: Path, tmp_path: Path) -> None:
    done = plan(tiny_bf16, tmp_path, type_name="q4_k", calibration=hot)
    found = types(done)
    assert (found["expert_down q4_k"], found["expert_down q5_k"]) == (4, 1)
    assert (found["expert_gate q4_k"], found["expert_gate iq4_nl"]) == (4, 1)
    note = next(note for note in done.notes if note.startswith("measured ranges changed"))
    assert "blk.1.ffn_gate_exps.weight" in note
    assert "a sum over 32 of ffn_in reaches 6e+04" in note


def test_the_file_has_the_changed_types(tiny_checkpoint: Path, hot: Path, tmp_path: Path) -> None:
    """Ranges measured on a GGUF, used for the checkpoint that it came from."""
    done = a3b("quantize", tiny_checkpoint, "--type", "iq4_nl", "--calibration", hot, "--no-bounds", "-o", tmp_path / "q.gguf", "--json")
    assert done.returncode == 0, done.stderr
    assert any("super experts" in note for note in json.loads(done.stdout)["notes"])
    kinds = {info.name: info.type.name for info in read_gguf(tmp_path / "q.gguf").tensors}
    assert (kinds["blk.2.ffn_down_exps.weight"], kinds["blk.1.ffn_down_exps.weight"]) == ("q5_k", "iq4_nl")


def test_what_was_chosen_by_hand_stays(tiny_bf16: Path, hot: Path, tmp_path: Path) -> None:
    done = plan(tiny_bf16, tmp_path, type_name="q4_k", calibration=hot, tensor_types=("blk.1.ffn_gate_exps=q4_1",))
    assert types(done)["expert_gate q4_1"] == 1
    assert "measured ranges speak against the type of 1 tensors that you chose: blk.1.ffn_gate_exps.weight" in done.notes


def test_stock_types_stay_llama_quantizes(tiny_bf16: Path, hot: Path, tmp_path: Path) -> None:
    with_ranges = plan(tiny_bf16, tmp_path, type_name="q4_k_m", stock=True, calibration=hot)
    (hot / "clip_bounds.bin").unlink()
    assert types(with_ranges) == types(plan(tiny_bf16, tmp_path, type_name="q4_k_m", stock=True, calibration=hot))


def test_a_folder_without_ranges_is_a_note(tiny_bf16: Path, hot: Path, tmp_path: Path) -> None:
    (hot / "clip_bounds.bin").unlink()
    notes = plan(tiny_bf16, tmp_path, type_name="q4_k", calibration=hot).notes
    assert f"there is no {hot / 'clip_bounds.bin'}: no type was checked for overflow or super experts" in notes


def test_ranges_of_another_model_are_refused(tiny_bf16: Path, hot: Path, tmp_path: Path) -> None:
    found = read_bounds(hot / "clip_bounds.bin")
    write_bounds(hot / "clip_bounds.bin", replace(found.header, model_id="00" * 32), found.records)
    with pytest.raises(BadInput, match="was measured on another model: Tiny A3B, model_id 000000000000; the source has"):
        plan(tiny_bf16, tmp_path, type_name="q4_k", calibration=hot)


def test_the_id_of_a_source_is_that_of_its_files(tiny_bf16: Path, tiny_checkpoint: Path) -> None:
    from a3b_convert import open_checkpoint

    expected = model_id(read_gguf(tiny_bf16))
    assert model_id_of(open_gguf_model(tiny_bf16)) == expected
    assert model_id_of(open_checkpoint(tiny_checkpoint)) == expected


DOWN, GATE, UP = "blk.2.ffn_down_exps.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"
SHARED = tuple(f"blk.1.ffn_{part}_shexp.weight" for part in ("gate", "up"))
UNSAFE = "not iq1_s, q2_k, q4_0, q4_1, q4_k, q5_1, q5_k"


def target(**asked: object) -> Target:
    return Target(sensitivity="table", candidates=("q4_k", "q8_0"), **asked)  # type: ignore[arg-type]


def weighed(source: Path, calibration: Path) -> Weighed:
    return weigh(source, Options(bounds=False, threads=1, calibration=calibration), target())


def test_an_allocation_keeps_to_the_ranges(tiny_bf16: Path, calibration: Path, hot: Path, tmp_path: Path) -> None:
    within, out = weighed(tiny_bf16, hot), tmp_path / "q.gguf"
    with pytest.raises(AnswerIsNo) as refused:
        fit_target(within, out, target(n_bytes=1_000_000), write=False)
    least = int(re.findall(r"--target-size (\d+) would work", refused.value.hint)[0])
    prepared, found = fit_target(within, out, target(n_bytes=least), write=True)
    assert found.n_bytes == found.smallest == least
    kinds = {each.name: each.type.name for each in prepared.assignments}
    assert kinds[DOWN] == "q5_k"  # no candidate: the floor may always be chosen
    assert {kinds[name] for name in (GATE, UP, *SHARED)} == {"q8_0"}
    assert {kind for name, kind in kinds.items() if name not in (DOWN, GATE, UP, *SHARED)} == {"q4_k", "f32"}

    q4, q5, q8 = (TYPES[name].nbytes((8, 256, 256)) for name in ("q4_k", "q5_k", "q8_0"))
    costs = {(GATE, UP): 2 * (q8 - q4), (DOWN,): q5 - q4} | {(name,): (q8 - q4) // 8 for name in SHARED}
    assert {each.names: each.n_bytes for each in found.protected} == costs
    assert [each.rule for each in found.protected] == [UNSAFE, "at least q5_k", UNSAFE, UNSAFE]  # dearest first
    assert "its output reaches 5e+04" in found.protected[1].why
    assert f"{sum(costs.values()):,} of them because measured ranges protect tensors: {GATE} and {UP} {UNSAFE}" in refused.value.message
    assert f"for {least - sum(costs.values()):,} bytes at least" in refused.value.hint

    _, free = fit_target(weighed(tiny_bf16, calibration), out, target(n_bytes=least), write=False)
    assert (free.protected, free.free_loss) == ((), None)
    assert free.smallest == pytest.approx(least - sum(costs.values()), abs=64)  # the header names the matrix, in another folder
    assert found.free_loss == pytest.approx(free.loss)
    assert free.loss < found.loss

    again = plan(tiny_bf16, tmp_path, policy=str(found.policy), calibration=hot)  # its types need no second protection
    assert {line.name: line.type for line in again.tensors} == kinds
    assert not [note for note in again.notes if "measured ranges" in note]


def test_candidates_that_are_all_unsafe_are_refused(tiny_bf16: Path, hot: Path) -> None:
    options = Options(bounds=False, threads=1, calibration=hot)
    with pytest.raises(UsageError, match="none is safe for blk.1.ffn_gate_exps.weight: a sum over 32 of ffn_in reaches 6e\\+04"):
        weigh(tiny_bf16, options, Target(sensitivity="table", candidates=("q4_k",)))


def test_an_allocation_without_ranges_says_so(tiny_bf16: Path, hot: Path, tmp_path: Path) -> None:
    (hot / "clip_bounds.bin").unlink()
    _, found = fit_target(weighed(tiny_bf16, hot), tmp_path / "out.gguf", target(n_bytes=8_000_000), write=False)
    assert found.protected == ()
    assert f"there is no {hot / 'clip_bounds.bin'}: no type was checked for overflow or super experts" in found.notes
