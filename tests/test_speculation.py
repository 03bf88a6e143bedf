"""Guessing ahead: the same answers in fewer steps, whoever guesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import Context, load_model, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_server import engine as engine_module
from a3b_server import mtp as mtp_module
from a3b_server.drafts import PROBE_FIRST, PROBE_MOST, RECHECK, Costs, Drafter, Gate, PromptLookup
from a3b_server.messages import Submit, Tokens
from a3b_server.sampling import Sampling
from a3b_server.scheduler import Sequence as Running
from engine_bench import GREEDY, PARAMS, QUESTIONS, Bench, Logits, opened, plain_logits

# Verifying rows are computed together and plain ones alone; where plain decoding's own margin is below this, either may win.
MARGIN = 0.01
ASKED = (*QUESTIONS, "Count from one to nine.", "Spell the word garden.", "Repeat: red, green, blue, white, red, green, blue.")


def drafting(n_draft: int) -> LoadParams:
    return replace(PARAMS, n_draft=n_draft, n_outputs_max=PARAMS.n_seq_max * (1 + n_draft))


@pytest.fixture(scope="module")
def plain(tiny_bf16: Path) -> Iterator[tuple[Bench, dict[str, list[int]], Logits]]:
    """Without drafts: a bench, its answers, one request at a time, and logits of its own margins."""
    with opened(tiny_bf16, PARAMS) as bench, plain_logits(bench.context.model) as oracle:
        yield bench, {question: bench.answer(bench.prompt(question), max_tokens=40)[0] for question in ASKED}, oracle


def assert_same(answers: Sequence[Sequence[int]], plain: tuple[Bench, dict[str, list[int]], Logits]) -> None:
    """The answers to ASKED are those of plain decoding, but where its two best tokens were as good as equal."""
    bench, expected, oracle = plain
    ties = 0
    for question, answer in zip(ASKED, answers, strict=True):
        known = expected[question]
        at = next((i for i, (a, b) in enumerate(zip(answer, known, strict=False)) if a != b), None)
        if at is None:
            assert len(answer) == len(known)
            continue
        best = np.sort(oracle([*bench.prompt(question), *known[:at]]))
        assert best[-1] - best[-2] < MARGIN, f"{question}: token {at} differs"
        ties += 1
    assert ties <= 1


class Rows:
    """Notes of every call the rows of each sequence, and how many of them gave logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []
        monkeypatch.setattr(engine_module, "decode", self)

    def __call__(self, context: Context, batch: Batch) -> int:
        seqs, outputs = batch.seq[: len(batch)], batch.output[: len(batch)]
        used = sorted(set(seqs.tolist()))
        self.calls.append(([int((seqs == seq).sum()) for seq in used], [int(outputs[seqs == seq].sum()) for seq in used]))
        return decode(context, batch)


@pytest.mark.parametrize("n_draft", [1, 2, 3])
def test_mtp_drafts_change_nothing_but_the_number_of_steps(
    tiny_bf16: Path, plain: tuple[Bench, dict[str, list[int]], Logits], monkeypatch: pytest.MonkeyPatch, n_draft: int
) -> None:
    with opened(tiny_bf16, drafting(n_draft), mtp=True) as bench:
        rows = Rows(monkeypatch)
        assert_same(bench.answer(*map(bench.prompt, ASKED), max_tokens=40), plain)
        ends = [bench.end(str(i)) for i in range(len(ASKED))]
        rate = sum(end.n_accepted for end in ends) / sum(end.n_drafted for end in ends)
        assert rate > 0.5  # the block was trained
        verified = [(counts, outputs) for counts, outputs in rows.calls if max(outputs) > 1]
        assert verified
        assert all(counts == outputs == [1 + n_draft] * len(counts) for counts, outputs in verified)


class Damaged:
    """A drafter whose guesses are changed at random, so that every length of roll-back occurs."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._rng = drafter, np.random.default_rng(3)
        self._draft = drafter.draft

    def __call__(self, sequences: Sequence[Running]) -> dict[int, list[int]]:
        drafts = self._draft(sequences)
        return {seq: [token if self._rng.random() < 0.7 else 7 for token in guess] for seq, guess in drafts.items()}


@pytest.mark.parametrize("mtp", [True, False])
def test_wrong_drafts_are_taken_back(tiny_bf16: Path, plain: tuple[Bench, dict[str, list[int]], Logits], mtp: bool) -> None:
    with opened(tiny_bf16, drafting(3), mtp) as bench:
        assert bench.engine._speculation is not None
        drafter = bench.engine._speculation.drafter
        drafter.draft = Damaged(drafter)  # type: ignore[method-assign]
        assert_same(bench.answer(*map(bench.prompt, ASKED), max_tokens=40), plain)
        drafted = sum(bench.end(str(i)).n_drafted for i in range(len(ASKED)))
        accepted = sum(bench.end(str(i)).n_accepted for i in range(len(ASKED)))
        assert 0 < accepted < drafted


def test_a_seed_draws_the_same_tokens_with_drafts_and_without(tiny_bf16: Path, plain: tuple[Bench, dict[str, list[int]], Logits]) -> None:
    """Rows are drawn from in order and none past the first that differs, so the distribution is the model's own."""
    bench = plain[0]
    requests = [Submit(str(i), bench.prompt("Name a fruit."), 12, Sampling(temperature=1.5, top_p=0.98, seed=i)) for i in range(40)]
    expected = bench.ask(*requests)
    with opened(tiny_bf16, drafting(2), mtp=True) as drafted:
        found = drafted.ask(*requests)
        assert any(drafted.end(str(i)).n_accepted for i in range(40))
    assert len({tuple(answer) for answer in expected}) > 20
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 38  # rounding moves a border of the draw now and then


@contextmanager
def fresh(path: Path) -> Iterator[Bench]:
    with opened(path, drafting(2), mtp=True) as bench:
        yield bench


def test_the_block_follows_through_checkpoints_and_forks(tiny_bf16: Path) -> None:
    system = "<|im_start|>system\nAnswer shortly." + " Keep to the facts." * 30 + "<|im_end|>\n"
    with opened(tiny_bf16, drafting(2), mtp=True) as bench, fresh(tiny_bf16) as other:
        mark = (len(bench.text(system)),)
        prompts = [bench.text(system) + bench.prompt(question) for question in ("Count from one to nine.", "What is the capital of Japan?")]
        bench.ask(Submit("a", prompts[0], 30, GREEDY, mark))
        (found,) = bench.ask(Submit("b", prompts[1], 30, GREEDY, mark))  # a fork: most of the first slot's text is another's
        (again,) = bench.ask(Submit("c", prompts[0], 30, GREEDY, mark))
        assert (bench.end("c").n_cached, bench.end("c").n_accepted > 0) == (mark[0], True)
        (expected,) = other.ask(Submit("b", prompts[1], 30, GREEDY, mark))
        (first,) = other.ask(Submit("a", prompts[0], 30, GREEDY, mark))
        assert (found, again) == (expected, first)


def test_a_copy_of_a_slot_whose_drafts_were_just_taken_back_is_right(tiny_bf16: Path) -> None:
    """llama.cpp's own copy would have the state before that: the engine saves and loads the true one."""
    with opened(tiny_bf16, drafting(3), mtp=True) as bench, plain_logits(bench.context.model) as oracle:
        assert bench.engine._speculation is not None
        drafter = bench.engine._speculation.drafter
        drafter.draft = Damaged(drafter)  # type: ignore[method-assign]
        ask = replace(GREEDY, ignore_eos=True, n_logprobs=0)
        bench.engine.submit(Submit("a", bench.prompt("Count from one to nine."), 300, ask))
        for i in range(12):
            source = bench.engine.scheduler.find("a")
            while source is None or source.evaluated < 40 or source.seq not in bench.engine.slots._rolled_back:
                bench.engine.step()
                source = bench.engine.scheduler.find("a")
            prompt = (*source.tokens[: source.evaluated], *bench.text(" And then? Say it."))
            n_held = source.evaluated
            bench.engine.submit(Submit(str(i), prompt, 1, ask))
            while bench.engine.scheduler.find(str(i)) or bench.engine.scheduler.waiting:
                bench.engine.step()
            assert bench.end(str(i)).n_cached == n_held
            spoken = [pair for event in bench.events if isinstance(event, Tokens) for pair in zip(event.pairs, event.logprobs, strict=True)]
            (told,) = [logprobs for (name, _), logprobs in spoken if name == str(i)]
            assert told is not None
            row = oracle(list(prompt)).astype(np.float64)
            total = row.max() + np.log(np.exp(row - row.max()).sum())
            assert told.logprob == pytest.approx(row[bench.tokens(str(i))[0]] - total, abs=0.15)


def test_many_slots_guess_in_one_call(tiny_bf16: Path) -> None:
    params = replace(drafting(2), n_seq_max=16, n_outputs_max=48, n_batch=64, n_ubatch=64)
    with opened(tiny_bf16, params, mtp=True) as bench:
        bench.answer(*[bench.prompt(f"Spell the word garden, {i} times if you please.") for i in range(16)], max_tokens=12)
        assert all(bench.end(str(i)).n_accepted for i in range(16))


def test_answers_go_on_without_drafts_when_the_block_fails(
    tiny_bf16: Path, plain: tuple[Bench, dict[str, list[int]], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_module, "decode", lambda context, batch: -2)
    with opened(tiny_bf16, drafting(2), mtp=True) as bench:
        assert_same(bench.answer(*map(bench.prompt, ASKED), max_tokens=40), plain)
        assert all(bench.end(str(i)).n_drafted == 0 for i in range(len(ASKED)))


def test_no_room_for_drafts_drops_them_alone(
    tiny_bf16: Path, plain: tuple[Bench, dict[str, list[int]], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(context: Context, batch: Batch) -> int:
        verifies = 1 < batch.output[: len(batch)].sum() == len(batch) and len(set(batch.seq[: len(batch)])) < len(batch)
        return 1 if verifies else decode(context, batch)

    monkeypatch.setattr(engine_module, "decode", full)
    with opened(tiny_bf16, drafting(2), mtp=True) as bench:
        assert_same(bench.answer(*map(bench.prompt, ASKED), max_tokens=40), plain)


def test_parameters_must_leave_room_for_drafts(tiny_bf16: Path) -> None:
    with load_model(tiny_bf16, PARAMS) as model:
        few = (replace(PARAMS, n_draft=2), replace(drafting(2), n_ubatch=8))
        for wrong in (*few, replace(PARAMS, n_draft=-1), replace(PARAMS, n_draft=99)):
            with pytest.raises(UsageError, match="sequences|cannot be drafted"):
                open_context(model, wrong)


# Without a model


def running(tokens: list[int]) -> Running:
    return Running(Submit("a", tuple(tokens), 100, GREEDY), 0, list(tokens))


def test_lookup_guesses_what_followed_before() -> None:
    lookup, sequence = PromptLookup(2), running([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert lookup.draft([sequence]) == {0: [4, 5]}
    sequence.tokens += [4, 5]
    assert lookup.draft([sequence]) == {0: [9, 1]}
    sequence.tokens += [7]
    assert lookup.draft([sequence]) == {}
    sequence.tokens += [2, 3, 8, 7, 2, 3]
    assert lookup.draft([sequence]) == {0: [8, 7]}  # what came last counts
    lookup.begin(0, None, 0, None)
    assert lookup.draft([running([1, 2, 3])]) == {}
    assert lookup.draft([running([1, 2, 3, 1, 2, 3])]) == {0: [1, 2]}


def test_the_gate_closes_when_guesses_are_wrong_and_tries_again() -> None:
    gate = Gate(gain=2.0)
    steps = 0
    while gate.opens(1.5):
        gate.note(0)
        steps += 1
    assert 3 < steps < 30
    pauses = []
    for _ in range(6):
        waited = 1
        while not gate.opens(1.5):
            waited += 1
        gate.note(0)
        pauses.append(waited)
    assert pauses[0] <= PROBE_FIRST
    assert pauses[-1] == PROBE_MOST
    for _ in range(30):
        gate.note(2)
    assert gate.opens(1.5)


def test_costs_are_ratios_of_measured_steps() -> None:
    costs = Costs()
    assert costs.of(2) is None
    costs.note(2, 0.010, drafted=False)
    assert costs.of(2) == 1.0
    costs.note(2, 0.015, drafted=True)
    assert costs.of(2) == pytest.approx(1.5)
    assert costs.of(1) is None
    for _ in range(RECHECK):
        costs.of(2)
    assert costs.of(2) is None  # time for a step without drafts
    fixed = Costs(fixed=True)
    assert fixed.of(1) == fixed.of(4)
