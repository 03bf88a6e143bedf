"""Types for a number of bytes: the best that fits, the exact size, and a policy that can be used again."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_gguf.errors import AnswerIsNo, BadInput, Interrupted, UsageError
from a3b_gguf.flows.allocate import Target, Weighed, fit_target, prepare_allocated, weigh
from a3b_gguf.flows.measure_sensitivity import sensitivities
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.flows.quantize_plan import open_source
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import write_files
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.weights import Weights
from a3b_gguf.tensors import TYPES, TensorJob
from a3b_quantize.allocate import CANDIDATES, Option, Unit, choose, grouped, hull, largest, smallest, unit
from a3b_quantize.assign import Assignment
from a3b_quantize.encode import Encoding
from a3b_quantize.evaluate import Text, chunked
from a3b_quantize.policy import choose_policy
from a3b_quantize.sampling_errors import Sample, encoded, relative_error, relative_errors, take_sample
from a3b_quantize.sensitivity import Sensitivities, as_stored, from_table, measure, probe, read_sensitivities, write_sensitivities
from command import assert_refused
from inside import inside as a3b

TABLE = Target(sensitivity="table")
TEXT = files("a3b_quantize") / "sample.txt"
KINDS = [TYPES[name] for name in CANDIDATES]


def units_of(rows: list[list[tuple[int, float]]]) -> list[Unit]:
    """Units from (bytes, loss) pairs, dominated ones left out as `unit` does."""
    found = []
    for number, pairs in enumerate(rows):
        best: list[Option] = []
        for n_bytes, loss in sorted(pairs):
            if not best or loss < best[-1].loss:
                best.append(Option(KINDS[len(best)], n_bytes, loss))
        found.append(Unit((f"t{number}",), tuple(best)))
    return found


def optimum(units: list[Unit], budget: int) -> float:
    choices = itertools.product(*(each.options for each in units))
    return min(sum(o.loss for o in choice) for choice in choices if sum(o.n_bytes for o in choice) <= budget)


pair = st.tuples(st.integers(1, 60), st.floats(0.001, 100))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.lists(pair, min_size=1, max_size=5), min_size=1, max_size=5), share=st.floats(0, 1.2))
def test_a_choice_fits_and_is_near_the_optimum(rows: list[list[tuple[int, float]]], share: float) -> None:
    units = units_of(rows)
    budget = round(smallest(units) + share * (largest(units) - smallest(units)))
    found = choose(units, budget)
    assert found.n_bytes <= budget
    best = optimum(units, budget)
    # The gap of a greedy choice is at most what one more step would have saved.
    step = max((a.loss - b.loss for each in units for a, b in itertools.pairwise(each.options)), default=0.0)
    assert best - 1e-9 <= found.loss <= best + step + 1e-9
    if share >= 1:
        assert found.loss == pytest.approx(sum(each.options[-1].loss for each in units))


def test_choices_are_optimal_most_of_the_time() -> None:
    rng, gaps = np.random.default_rng(3), []
    for _ in range(200):
        rows = [[(int(b), float(x)) for b, x in zip(rng.integers(5, 90, 6), rng.exponential(1, 6), strict=True)] for _ in range(5)]
        units = units_of(rows)
        budget = int(rng.integers(smallest(units), largest(units) + 1))
        gaps.append(choose(units, budget).loss / optimum(units, budget) - 1)
    assert np.median(gaps) == pytest.approx(0, abs=1e-9)
    assert np.mean(gaps) < 0.02


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes are too few, 10 are needed"):
        choose(units_of([[(10, 1.0)]]), 9)


def test_hull_leaves_out_what_lies_above_it() -> None:
    options = [Option(KINDS[i], *pair) for i, pair in enumerate([(10, 9.0), (20, 8.5), (30, 4.0), (40, 3.9), (50, 1.0)])]
    assert hull(options) == [0, 2, 4]


def test_errors_are_those_of_the_output() -> None:
    """The predicted noise of y = W x against the noise itself, over random inputs with these mean squares."""
    rng = np.random.default_rng(0)
    importance = rng.exponential(1, (2, 256)).astype(np.float32)
    values = rng.normal(0, 1, (2, 32, 256)).astype(np.float32)
    sample = Sample("w", TYPES["f32"], values, importance, np.array([0.75, 0.25]))
    for kind in (TYPES["q4_k"], TYPES["iq4_nl"]):
        back = encoded(sample, kind, Encoding(threads=1))
        noise = signal = 0.0
        for matrix, share in enumerate((0.75, 0.25)):
            x = rng.normal(0, 1, (256, 4000)) * np.sqrt(importance[matrix])[:, None]
            noise += share * np.mean(((back[matrix] - values[matrix]) @ x) ** 2)
            signal += share * np.mean((values[matrix] @ x) ** 2)
        assert relative_error(sample, back) == pytest.approx(noise / signal, rel=0.05)


def test_a_sample_stands_for_the_whole(tiny_bf16: Path) -> None:
    tensor = next(t for t in open_gguf_model(tiny_bf16).tensors if t.name == "blk.1.ffn_up_exps.weight")
    kinds = [TYPES["q4_k"], TYPES["q6_k"]]
    whole = relative_errors(take_sample(tensor, None, None), kinds, Encoding(threads=1))
    part = relative_errors(take_sample(tensor, None, None, 1 << 14), kinds, Encoding(threads=1))
    assert take_sample(tensor, None, None, 1 << 14).shape == (8, 8, 256)
    assert part == pytest.approx(whole, rel=0.1)
    assert whole["q6_k"] < 0.1 * whole["q4_k"]


BUDGETS = (4_700_000, 5_000_000, 5_500_001, 6_000_002, 6_500_003, 7_000_004, 7_743_424, 8_047_552, 9_999_999, 12_000_000)


@pytest.fixture(scope="module")
def weighed(tiny_bf16: Path) -> Weighed:
    return weigh(tiny_bf16, Options(bounds=False, threads=1), TABLE)


def test_sizes_are_exact_to_the_byte_for_ten_budgets(weighed: Weighed, tmp_path: Path) -> None:
    losses = []
    for number, budget in enumerate(BUDGETS):
        out = tmp_path / f"{number}.gguf"
        prepared, found = fit_target(weighed, out, Target(n_bytes=budget), write=False)
        write_files([replace(file, jobs=tuple(map(zeros, file.jobs))) for file in prepared.files])
        assert found.n_bytes == out.stat().st_size <= budget
        assert read_gguf(out).file_size == found.n_bytes
        assert budget - found.n_bytes < 0.005 * budget
        losses.append(found.loss)
    assert losses == sorted(losses, reverse=True)


def zeros(job: TensorJob) -> TensorJob:
    """A job of the same size whose bytes cost nothing."""
    return replace(job, chunks=lambda: iter([bytes(job.nbytes)]))


def test_an_impossible_budget_says_what_would_work(weighed: Weighed, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    with pytest.raises(AnswerIsNo, match="1,000,000 bytes are too few") as refused:
        fit_target(weighed, out, Target(n_bytes=1_000_000), write=True)
    would = re.search(r"--target-size (\d+) would work", refused.value.hint)
    assert would
    least = int(would[1])
    assert fit_target(weighed, out, Target(n_bytes=least), write=False)[1].n_bytes == least
    with pytest.raises(AnswerIsNo):
        fit_target(weighed, out, Target(n_bytes=least - 1), write=False)
    with pytest.raises(AnswerIsNo, match="1 bits a weight are too few") as bits:
        fit_target(weighed, out, Target(bits_per_weight=1.0), write=False)
    enough = float(re.findall(r"--target-bpw ([\d.]+)", bits.value.hint)[0])
    fit_target(weighed, out, Target(bits_per_weight=enough), write=False)
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_budget_is_refused_before_anything_is_measured(weighed: Weighed, tiny_bf16: Path, tmp_path: Path) -> None:
    """And says the same as when everything is known."""
    steps: list[str] = []

    def shown(what: str) -> Callable[[int, int], None]:
        steps.append(what)
        return lambda done, total: None

    for target in (Target(n_bytes=1_000_000, sensitivity="table"), Target(bits_per_weight=1.0, sensitivity="table")):
        with pytest.raises(AnswerIsNo) as early:
            prepare_allocated(tiny_bf16, tmp_path / "o.gguf", weighed.options, target, write=True, shown=shown)
        with pytest.raises(AnswerIsNo) as late:
            fit_target(weighed, tmp_path / "o.gguf", target, write=True)
        assert (early.value.message, early.value.hint) == (late.value.message, late.value.hint)
    assert not steps
    assert not list(tmp_path.iterdir())


def test_a_budget_beyond_the_largest_says_so(weighed: Weighed, tmp_path: Path) -> None:
    prepared, found = fit_target(weighed, tmp_path / "o.gguf", Target(bits_per_weight=16.0), write=False)
    assert "more than the largest choice takes" in found.notes[0]
    assert {each.type.name for each in prepared.assignments if not each.type.is_float} == {"q8_0"}


def test_gate_and_up_of_a_layer_share_a_type(weighed: Weighed, tmp_path: Path) -> None:
    prepared, _ = fit_target(weighed, tmp_path / "o.gguf", Target(bits_per_weight=4.4), write=False)
    types = {each.name: each.type.name for each in prepared.assignments}
    gates = [name for name in types if "ffn_gate_exps" in name]
    assert len(gates) == 5
    pairs = [tuple(each.name for each in group) for group in weighed.groups if len(group) > 1]
    assert sorted(pairs) == sorted((name, name.replace("gate", "up")) for name in gates)
    assert all(types[name] == types[name.replace("gate", "up")] for name in gates)
    assert len(set(types.values()) & set(CANDIDATES)) > 3


def test_the_policy_gives_the_same_tensors_again(tiny_bf16: Path, tmp_path: Path) -> None:
    words = ("quantize", tiny_bf16, "--no-bounds", "--threads", 1)
    target = ("--target-bpw", 4.9, "--sensitivity", "table", "--candidates", "iq4_xs,q6_k,q8_0", "--tensor-type", "attn_k=q8_0")
    first = a3b(*words, *target, "-o", tmp_path / "a.gguf")
    assert first.returncode == 0, first.stderr
    assert "predicted loss, for comparing" in first.stdout
    policy = tmp_path / "a.policy.toml"
    assert f"wrote {policy}" in first.stdout
    again = a3b(*words, "--policy", policy, "-o", tmp_path / "b.gguf")
    assert again.returncode == 0, again.stderr
    a, b = read_gguf(tmp_path / "a.gguf"), read_gguf(tmp_path / "b.gguf")
    assert [(t.name, t.type.name) for t in a.tensors] == [(t.name, t.type.name) for t in b.tensors]
    assert (tmp_path / "a.gguf").read_bytes()[a.data_offset :] == (tmp_path / "b.gguf").read_bytes()[b.data_offset :]
    assert next(t for t in a.tensors if t.name == "blk.3.attn_k.weight").type.name == "q8_0"
    bits = 8 * sum(t.nbytes for t in a.tensors) / sum(np.prod(t.shape) for t in a.tensors)
    assert 4.9 * 0.99 < bits <= 4.9


def test_dry_run_shows_size_and_loss(tiny_checkpoint: Path, tmp_path: Path) -> None:
    target = ("--target-size", "7.5MiB", "--sensitivity", "table", "--candidates", "iq4_xs,q8_0")
    done = a3b("quantize", tiny_checkpoint, *target, "--dry-run", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["nbytes"] == found["allocation"]["n_bytes"] <= int(7.5 * 2**20)
    assert found["allocation"]["loss"] > found["allocation"]["base_loss"] > 0
    assert found["allocation"]["policy"] is None
    assert not found["allocation"]["measured"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "target", "words"),
    [
        (Options(stock=True, type_name="q4_k_m"), TABLE, "choose the types themselves"),
        (Options(policy="write-up"), TABLE, "choose the types themselves"),
        (Options(type_name="q5_1"), TABLE, "must be a recipe"),
        (Options(), Target(n_bytes=1, bits_per_weight=4.0), "exclude each other"),
        (Options(), Target(bits_per_weight=0.1), "cannot be"),
        (Options(), Target(n_bytes=1, sensitivity="guess"), "no 'guess'"),
        (Options(), Target(n_bytes=1, candidates=("q9",)), "'q9' is no type"),
        (Options(), Target(n_bytes=1, candidates=("q8_k",)), "'q8_k' is no type"),
        (Options(), Target(n_bytes=1, candidates=("i32",)), "'i32' is no type"),
        (Options(), Target(n_bytes=0), "--target-size: 0 bytes"),
    ],
)
def test_flags_that_cannot_be_obeyed(tiny_bf16: Path, options: Options, target: Target, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        prepare_allocated(tiny_bf16, None, options, target, write=False)


def test_sensitivity_flags_want_a_target(tiny_bf16: Path) -> None:
    assert_refused(a3b("quantize", tiny_bf16, "--type", "iq4_nl", "--candidates", "q8_0"), 2, "are for a target")


def test_replaced_weights_are_computed_with_and_come_back(tiny_bf16: Path) -> None:
    text = Text("t", "What is the capital of Chile? " * 30)
    tensors = {tensor.name: tensor for tensor in open_gguf_model(tiny_bf16).tensors}
    with LlamaLog():
        with load_model(tiny_bf16, LoadParams(n_ctx=256), vocab_only=True) as vocabulary:
            chunks = chunked(vocabulary, text, 64, 2)
        names = ("blk.3.ffn_gate_shexp.weight", "blk.4.attn_q.weight", "blk.0.attn_qkv.weight")
        wanted = [tensors[name] for name in names]
        told: list[tuple[int, int]] = []
        found = measure(tiny_bf16, wanted, chunks, lambda name: (None, None), Encoding(threads=1), lambda *at: told.append(at))
        assert told[-1] == (3, 3)
        assert found.keys() == {"blk.0.attn_qkv.weight", "blk.3.ffn_gate_shexp.weight"}  # the MTP block is not run
        assert min(found.values()) > 1e-4
        alone = measure(tiny_bf16, wanted[-1:], chunks, lambda name: (None, None), Encoding(threads=1), lambda *at: None)
        assert alone["blk.0.attn_qkv.weight"] == found["blk.0.attn_qkv.weight"]  # so the tensor before it was as it had been
        known = {"blk.3.ffn_gate_shexp.weight": 7.0}
        measure(tiny_bf16, wanted[:1], chunks, lambda name: (None, None), Encoding(threads=1), lambda *at: None, known)
        assert known == {"blk.3.ffn_gate_shexp.weight": 7.0}  # is not measured again
        with load_model(tiny_bf16, LoadParams(n_ctx=256, use_mmap=False)) as model:
            weights = Weights(model)
            name = "blk.3.attn_q.weight"
            assert bytes(weights.read(name)) == tensors[name].raw(0, 512)
            with pytest.raises(ValueError, match="bytes, not 8"):
                weights.write(name, np.zeros(8, np.uint8))


def test_a_probe_is_the_same_in_pieces(tiny_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with importance, used unevenly: the bytes and the error of the whole tensor at once."""
    tensor = next(t for t in open_gguf_model(tiny_bf16).tensors if t.name == "blk.1.ffn_up_exps.weight")
    rng = np.random.default_rng(5)
    importance, usage = rng.exponential(1, (8, 256)).astype(np.float32), rng.dirichlet(np.ones(8))
    whole = take_sample(tensor, importance, usage, 1 << 62)
    values = encoded(whole, TYPES["q3_k"], Encoding(threads=1))
    monkeypatch.setattr("a3b_quantize.sensitivity.PIECE_WEIGHTS", 100 * 256)
    data, error = probe(tensor, importance, usage, Encoding(threads=1), TYPES["bf16"])
    assert data.tobytes() == as_stored(values, TYPES["bf16"]).tobytes()
    assert error == pytest.approx(relative_error(whole, values), rel=1e-12)


def test_what_was_measured_before_an_interrupt_is_kept(tiny_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options, began = Options(bounds=False, threads=1, type_name="iq4_nl"), []
    source = open_source(tiny_bf16, options, choose_policy(options.choice))
    groups = grouped(choose_policy(options.choice).assign(source.model, False).assignments)

    def measure_some(*given: object) -> None:
        path, tensors, found = given[0], given[1], given[-1]
        assert path == tiny_bf16  # run as it stands, without a copy
        assert isinstance(tensors, list)
        assert isinstance(found, dict)
        began.append(len(found))
        found |= {tensor.name: 1.0 for tensor in tensors[: len(found) + 20]}
        if len(found) < len(tensors):
            raise KeyboardInterrupt

    monkeypatch.setattr("a3b_gguf.flows.measure_sensitivity.measure", measure_some)
    for done in (20, 40):
        with pytest.raises(Interrupted) as stopped:
            sensitivities(source, groups, options, "measure", (), lambda *at: None)
        assert stopped.value.hint.startswith(f"{done} of 50 tensors are measured and kept")
    found = sensitivities(source, groups, options, "measure", (), lambda *at: None)
    assert (len(found.values), found.measured, began) == (50, True, [0, 20, 40])
    assert sensitivities(source, groups, options, "auto", (), lambda *at: None) == found
    assert len(began) == 3
    assert [path.suffix for path in (tmp_path / "a3b" / "sensitivity").iterdir()] == [".json"]


def test_table_covers_every_kind_and_depth() -> None:
    kinds = ("attn_qkv", "ffn_down_exps", "ffn_gate", "strange")
    names = [f"blk.{i}.{kind}.weight" for i in range(40) for kind in kinds] + ["output.weight"]
    found = from_table(names, 40)
    assert found.values.keys() == set(names)
    assert all(value > 0 for value in found.values.values())
    assert not found.measured
    assert found.values["output.weight"] > found.values["blk.20.attn_qkv.weight"] > found.values["blk.20.ffn_down_exps.weight"]


def test_a_tensor_that_was_not_run_is_like_its_kind() -> None:
    found = Sensitivities({"blk.0.attn_q.weight": 1.0, "blk.1.attn_q.weight": 3.0, "blk.2.attn_q.weight": 2.0}, True, "")
    assert found.of("blk.4.attn_q.weight") == 2.0
    assert found.of("blk.4.nextn.eh_proj.weight") is None


def test_sensitivities_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "s.json"
    assert read_sensitivities(path) is None
    found = Sensitivities({"a": 0.5}, True, "measured")
    write_sensitivities(path, found)
    assert read_sensitivities(path) == found
    path.write_text('{"values": 3}')
    assert read_sensitivities(path) is None


def test_unit_drops_what_another_type_beats() -> None:
    group = [Assignment("w", (4, 256), TYPES["bf16"], TYPES["q8_0"], "", "")]
    found = unit(group, {"q4_k": 0.02, "iq4_nl": 0.03, "q3_k": 0.09, "q8_0": 0.02}, int)
    assert [option.type.name for option in found.options] == ["q3_k", "q4_k"]


def test_what_cannot_be_read_or_written_is_said_before_the_work(tiny_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("a3b_gguf.flows.measure_sensitivity.measure", lambda *given: pytest.fail("was measured"))
    options, wish = Options(bounds=False, threads=1), Target(n_bytes=8_000_000, sensitivity="measure", data=(str(tmp_path / "none.txt"),))
    with pytest.raises(BadInput, match=r"--sensitivity-data: .*none.txt: No such file"):
        prepare_allocated(tiny_bf16, tmp_path / "q.gguf", options, wish, write=False)
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        prepare_allocated(tiny_bf16, tmp_path / "nowhere" / "q.gguf", options, wish, write=False)
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        prepare_allocated(tiny_bf16, None, replace(options, report=tmp_path / "nowhere" / "r.json"), wish, write=False)
