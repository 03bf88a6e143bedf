"""Chats that are not read again: same slot, forks, checkpoints, prefixes that are read once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from a3b_gguf.llama.batch import last_position
from a3b_server import engine as engine_module
from a3b_server.checkpoints import CheckpointPool
from a3b_server.messages import Submit
from a3b_server.prefixes import Holding, Reuse, common_length, find_start
from a3b_server.stops import BEFORE_END, LEAST_GAP, aligned_stops, stops
from engine_bench import GREEDY, PARAMS, Bench, Calls, Logits, assert_greedy, opened, plain_logits

SYSTEM = "<|im_start|>system\nAnswer shortly." + " Keep to the facts." * 120 + "<|im_end|>\n"
TURN = "<|im_start|>user\n{}<|im_end|>\n"
GENERATION = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def shared(tiny_bf16: Path) -> Iterator[Bench]:
    with opened(tiny_bf16, replace(PARAMS, n_ctx=8192, n_batch=512, n_ubatch=512)) as bench:
        yield bench


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    found = Bench(shared.context, shared.vocab, replace(PARAMS, n_ctx=8192, n_batch=512, n_ubatch=512))
    yield found
    found.engine.close()
    assert [last_position(found.context, seq) for seq in range(4)] == [-1] * 4


@pytest.fixture(scope="module")
def oracle(shared: Bench) -> Iterator[Logits]:
    with plain_logits(shared.context.model, 512) as logits:
        yield logits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(engine_module, "decode", found)
    return found


def chat(bench: Bench, *turns: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of a chat that ends before an answer (turns: user, assistant, user, ...), and its marks as a template would give them."""
    text, marks = SYSTEM, [len(bench.text(SYSTEM))]
    for i, turn in enumerate(turns):
        if i % 2:
            text += f"<|im_start|>assistant\n{turn}<|im_end|>\n"  # the template drops an empty think block of an earlier turn
        else:
            text += TURN.format(turn)
            marks.append(len(bench.text(text)))
    return bench.text(text + GENERATION), tuple(marks)


def submit(name: str, prompt: tuple[int, ...], marks: tuple[int, ...] = (), max_tokens: int = 16) -> Submit:
    return Submit(name, prompt, max_tokens, GREEDY, marks)


def test_the_second_turn_of_a_chat_reads_only_what_is_new(bench: Bench, oracle: Logits, calls: Calls) -> None:
    first, marks = chat(bench, "What is the capital of Chile?")
    (answer,) = bench.ask(submit("1", first, marks))
    said = b"".join(map(bench.vocab.piece, answer)).decode()
    second, marks = chat(bench, "What is the capital of Chile?", said, "And of Japan?")
    calls.rows.clear()
    (again,) = bench.ask(submit("2", second, marks))
    n_new = len(second) - common_length(first, second)
    n_read = sum(calls.rows) - (bench.end("2").n_generated - 1)
    assert len(first) > 480
    assert n_read <= n_new + 64
    assert bench.end("2").n_cached == len(second) - n_read
    assert_greedy(oracle, second, again)


def test_a_chat_whose_history_stays_as_it_was_goes_on_from_its_end(bench: Bench, oracle: Logits, calls: Calls) -> None:
    first, _ = chat(bench, "What is the capital of Chile?")
    (answer,) = bench.answer(first)
    second = (*first, *answer, *bench.text("<|im_end|>\n" + TURN.format("And of Japan?") + GENERATION))
    calls.rows.clear()
    (again,) = bench.answer(second)
    assert bench.end("0").n_cached == len(first) + len(answer)
    assert calls.rows[0] < 40
    assert_greedy(oracle, second, again)


def test_identical_requests_on_a_hybrid_get_identical_answers(bench: Bench) -> None:
    prompt, marks = chat(bench, "What is the weather in Paris?")
    answers = []
    for i in range(3):
        answers += bench.ask(submit(str(i), prompt, marks))
        assert (bench.end(str(i)).n_cached > 0) == (i > 0)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("together", [True, False])
def test_a_common_prefix_with_changing_tails_is_read_once(bench: Bench, oracle: Logits, calls: Calls, together: bool) -> None:
    chats = [chat(bench, question) for question in ("Name a fruit.", "What is 2 plus 3?", "Say hello.")]
    requests = [submit(str(i), *one) for i, one in enumerate(chats)]
    answers = bench.ask(*requests) if together else [bench.ask(request)[0] for request in requests]
    prefix = chats[0][1][0]
    n_tails = sum(len(prompt) - prefix for prompt, _ in chats)
    assert sum(calls.rows) - sum(map(len, answers)) <= prefix + n_tails
    for (prompt, _), answer in zip(chats, answers, strict=True):
        assert_greedy(oracle, prompt, answer)


def test_a_tail_that_changes_where_no_mark_is_costs_a_chunk_at_most(bench: Bench, calls: Calls) -> None:
    """A date at the end of one long message, as in a public report: the prefix is long, and nothing tells where it ends."""
    text = bench.text("The capital of Chile is Santiago. " * 200)[:1400]
    prompts = [(*text, *bench.text(f" Today is {day}.\n")) for day in ("Monday", "Tuesday", "Sunday")]
    bench.answer(prompts[0], max_tokens=1)
    for prompt in prompts[1:]:
        calls.rows.clear()
        bench.answer(prompt, max_tokens=1)
        assert sum(calls.rows) <= 64 + 64


def test_another_chat_does_not_push_a_long_one_out(bench: Bench, calls: Calls) -> None:
    long, marks = chat(bench, "Name a fruit.", "Fig.", "And another. " * 60)
    other = tuple(bench.vocab.tokenize("Say hello. " * 40, True))
    bench.ask(submit("1", long, marks))
    bench.ask(submit("2", other))
    bench.ask(submit("3", long, marks))
    assert bench.end("3").n_cached >= marks[-1]


def test_a_fork_leaves_the_running_source_as_it_is(bench: Bench, oracle: Logits) -> None:
    first, marks = chat(bench, "Count from one to nine.")
    second, others = chat(bench, "What is the capital of Japan?")
    bench.engine.submit(submit("a", first, marks, 40))
    for _ in range(6):
        bench.engine.step()
    bench.engine.submit(submit("b", second, others, 20))
    bench.run()
    assert bench.end("b").n_cached == marks[0]
    assert_greedy(oracle, first, bench.tokens("a"))
    assert_greedy(oracle, second, bench.tokens("b"))


def test_who_waits_for_a_prefix_goes_on_alone_when_its_reader_is_cancelled(bench: Bench, oracle: Logits) -> None:
    first, marks = chat(bench, "Name a fruit.")
    second, others = chat(bench, "Say hello.")
    bench.engine.submit(submit("a", first, marks))
    bench.engine.submit(submit("b", second, others))
    bench.engine.scheduler.chunk = 128
    bench.engine.step()
    assert bench.engine.scheduler.running[1].after is not None
    bench.engine.cancel("a")
    bench.run()
    assert bench.end("a").reason == "cancelled"
    assert bench.end("b").n_cached > 0  # what the first had read
    assert_greedy(oracle, second, bench.tokens("b"))


def test_a_full_cache_drops_what_nobody_uses_before_it_fails_anyone(tiny_bf16: Path) -> None:
    with opened(tiny_bf16, replace(PARAMS, n_ctx=1024)) as small, plain_logits(small.context.model) as oracle:

        def no_end(tokens: list[int]) -> NDArray[np.float32]:
            row = oracle(tokens)
            row[list(small.vocab.eog_tokens)] = -np.inf
            return row

        texts = [small.text(f"{word} " * 150)[:300] for word in ("red", "green", "blue", "white", "black", "brown")]
        for i, text in enumerate(texts):
            (answer,) = small.ask(Submit(str(i), text, 30, replace(GREEDY, ignore_eos=True)))
            assert len(answer) == 30
            assert_greedy(no_end, text, answer[:4])
        assert small.engine.look().counts.n_evicted > 0


def test_without_a_pool_chats_are_read_again_and_right(tiny_bf16: Path) -> None:
    with opened(tiny_bf16, replace(PARAMS, checkpoint_bytes=0)) as poor, plain_logits(poor.context.model) as oracle:
        prompt, marks = chat(poor, "Name a fruit.")
        for i in range(2):
            (answer,) = poor.ask(submit(str(i), prompt, marks))
            assert poor.end(str(i)).n_cached == 0
            assert_greedy(oracle, prompt, answer)


@pytest.mark.prove
def test_a_second_turn_is_eight_times_faster_than_reading_it_all(tiny_bf16: Path) -> None:
    with opened(tiny_bf16, replace(PARAMS, n_ctx=8192, n_batch=512, n_ubatch=512)) as bench:
        turns = ["Name a fruit. " * 200, "Fig.", "Another?"]
        first, marks = chat(bench, turns[0])
        second, more = chat(bench, *turns)
        assert len(first) > 1400
        ratios = []
        for _ in range(5):
            bench.engine.slots.clear()
            started = time.perf_counter()
            bench.ask(submit("full", second, more, 1))
            full = time.perf_counter() - started
            bench.engine.slots.clear()
            bench.ask(submit("1", first, marks))
            started = time.perf_counter()
            bench.ask(submit("2", second, more, 1))
            ratios.append(full / (time.perf_counter() - started))
        assert sorted(ratios)[2] >= 8


# Without a model


marked = st.lists(st.integers(-5, 40_000), max_size=20)


@given(start=st.integers(0, 30_000), length=st.integers(1, 30_000), marks=marked)
def test_stops_lie_inside_and_apart(start: int, length: int, marks: list[int]) -> None:
    found = stops(start, start + length, marks)
    assert found == sorted(set(found))
    assert all(start + LEAST_GAP <= count < start + length for count in found)
    assert all(b - a >= LEAST_GAP for a, b in itertools.pairwise(found))
    assert len(found) <= 6 + 2 * length // 8192


def test_stops_of_a_chat() -> None:
    assert stops(0, 1000, ()) == [1000 - BEFORE_END]
    assert stops(0, 1000, (300, 990)) == [300, 990]  # the mark before the generation prompt makes the one at the end needless
    assert stops(0, 1000, (300, 500, 700, 990)) == [300, 700, 990]
    assert stops(0, 1000, (300, 975, 990)) == [300, 975]
    assert stops(700, 1000, (300, 500, 700, 990)) == [990]
    assert stops(0, 20, (8, 15)) == []
    assert stops(0, 2000, (300, 1990)) == [300, 1990 - 64, 1990]
    assert stops(0, 20_000, ()) == [8192, 16384, 20_000 - BEFORE_END - 64, 20_000 - BEFORE_END]


@given(start=st.integers(0, 100).map(lambda n: 128 * n), length=st.integers(1, 20_000))
def test_aligned_stops_are_multiples(start: int, length: int) -> None:
    found = aligned_stops(start, start + length, 128)
    assert all(count % 128 == 0 and start < count < start + length for count in found)
    assert found == sorted(set(found))


@given(first=st.lists(st.integers(0, 2), max_size=700), n=st.integers(0, 700), second=st.lists(st.integers(0, 2), max_size=9))
def test_the_common_length_is_that_of_a_plain_loop(first: list[int], n: int, second: list[int]) -> None:
    other = first[:n] + second
    plain = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    assert common_length(first, other) == plain


def pool_of(*texts: list[int], n: int = 4) -> CheckpointPool:
    pool = CheckpointPool(8, 8 * n)
    for text in texts:
        assert pool.take(text) is not None
    return pool


def test_the_pool_keeps_to_its_budget_and_forgets_the_least_used() -> None:
    pool = pool_of([1], [1, 2], [1, 2, 3], [9], n=4)
    first = pool.find([1, 2, 3, 4], 1)
    assert first is not None
    assert first.tokens == [1]
    pool.touch(first)
    assert pool.take([7]) is not None
    assert (len(pool), pool.n_most) == (4, 4)
    assert pool.find([1, 2, 9], 9) is first  # [1, 2] was the least used
    again = pool.take([7])
    assert again is not None
    assert len(pool) == 4
    buffers = {int(c.state.ctypes.data) for c in pool._held}
    assert len(buffers) == 4
    assert CheckpointPool(100, 99).take([1]) is None
    assert CheckpointPool(0, 1 << 30).take([1]) is None


def test_a_prefix_comes_from_where_most_of_it_is() -> None:
    prompt = list(range(1000))
    plain = Reuse(False, CheckpointPool(0, 0))
    free, little, much = Holding(0), Holding(1, prompt[:100] + [5000] * 50, used=1), Holding(2, prompt[:900] + [5000] * 50, used=2)
    start = find_start(prompt, [free, little, much], plain)
    assert (start.seq, start.source, start.n_tokens) == (2, 2, 900)
    other = Holding(2, prompt[:300] + [5000] * 500, used=2)  # most of it would be lost: it is copied into the free slot
    start = find_start(prompt, [free, little, other], plain)
    assert (start.seq, start.source, start.n_tokens) == (0, 2, 300)
    busy = Holding(2, prompt[:900], False, 2)
    start = find_start(prompt, [free, little, busy], plain)
    assert (start.seq, start.source, start.n_tokens) == (0, 2, 900)
    assert find_start(prompt, [Holding(0, prompt)], plain).n_tokens == 999  # one token is always read
    reading = Holding(2, prompt[:100], False, 2, 0, prompt)
    start = find_start(prompt, [free, little, reading], plain)
    assert start.after == (2, 999)


def test_a_hybrid_starts_from_checkpoints_and_whole_texts_alone() -> None:
    prompt = list(range(1000))
    hybrid = Reuse(True, pool_of(prompt[:200], prompt[:600]))
    start = find_start(prompt, [Holding(0), Holding(1, [*prompt[:700], 5000])], hybrid)
    assert (start.seq, start.source, start.n_tokens) == (1, 1, 600)
    assert start.checkpoint is not None
    start = find_start(prompt, [Holding(0), Holding(1, prompt[:700])], hybrid)
    assert (start.n_tokens, start.checkpoint) == (700, None)
    start = find_start(prompt, [Holding(0), Holding(1, [*prompt[:150], 5000])], hybrid)
    assert (start.source, start.n_tokens) == (None, 0)


def test_aligned_reuse_takes_whole_chunks_that_were_read_as_such() -> None:
    prompt = list(range(1000))
    aligned = Reuse(False, CheckpointPool(0, 0), aligned=128)
    assert find_start(prompt, [Holding(0, prompt[:700], n_exact=512)], aligned).n_tokens == 512
    assert find_start(prompt, [Holding(0, prompt[:400], n_exact=512)], aligned).n_tokens == 384
    assert find_start(prompt, [Holding(0, prompt[:700])], aligned).n_tokens == 0
    assert find_start(prompt, [Holding(0, np.arange(1000).tolist(), n_exact=1000)], aligned).n_tokens == 896


def test_what_a_copy_costs_decides_from_how_many_tokens_it_is_made() -> None:
    prompt, pool = list(range(1000)), CheckpointPool(0, 0)
    other = [5000] * 500

    def copied(reuse: Reuse, n_common: int) -> int:
        return find_start(prompt, [Holding(0), Holding(1, [*prompt[:n_common], *other], used=1)], reuse).n_tokens

    shared, own = Reuse(False, pool), Reuse(False, pool, n_copied=64 * 100)
    assert [copied(shared, n) for n in (7, 8, 24)] == [0, 8, 24]
    assert [copied(own, n) for n in (24, 99, 100)] == [0, 0, 100]
    hybrid = Reuse(True, pool_of(prompt[:20], prompt[:40]))
    assert [copied(hybrid, n) for n in (30, 40)] == [0, 40]
