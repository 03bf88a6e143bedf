"""Who runs and what a call holds, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_server.calls import BadCall, Call, Limits, Rows, check_call
from a3b_server.messages import Submit
from a3b_server.pace import EVEN, LEAST, Pace
from a3b_server.sampling import Sampling
from a3b_server.scheduler import LEAST_CHUNK, Scheduler, Sequence, decode_call, need

LIMITS = Limits(n_ctx=1024, n_ctx_seq=1024, n_seq_max=4, n_batch=512, n_outputs_max=4, n_vocab=1000)


def request(name: str, n_prompt: int, max_tokens: int = 10) -> Submit:
    return Submit(name, tuple(i % 1000 for i in range(n_prompt)), max_tokens, Sampling(temperature=0))


def admit(scheduler: Scheduler) -> list[Sequence]:
    found = []
    while scheduler.next_to_start() is not None:
        found.append(scheduler.start())
    return found


def started(scheduler: Scheduler) -> list[tuple[str, int]]:
    return [(sequence.request.id, sequence.seq) for sequence in admit(scheduler)]


def test_requests_start_in_order_as_long_as_slots_and_tokens_last() -> None:
    scheduler = Scheduler(LIMITS, chunk=512)
    for name, n_prompt in (("a", 390), ("b", 490), ("c", 200), ("d", 10)):
        scheduler.submit(request(name, n_prompt))
    assert started(scheduler) == [("a", 0), ("b", 1)]  # 400 + 500 of 1024; c needs 210, and d must not overtake it
    assert [waiting.id for waiting in scheduler.waiting] == ["c", "d"]
    scheduler.release(scheduler.running[0])
    assert started(scheduler) == [("c", 0), ("d", 2)]
    assert scheduler.reserved == 500 + 210 + 20


def test_no_more_requests_run_than_there_are_slots() -> None:
    scheduler = Scheduler(LIMITS, chunk=512)
    for name in "abcdef":
        scheduler.submit(request(name, 5))
    assert started(scheduler) == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert started(scheduler) == []
    scheduler.release(scheduler.running[2])
    scheduler.release(scheduler.running[1])
    assert started(scheduler) == [("e", 1), ("f", 2)]


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(0, 10), (5, 0), (1000, 25)])
def test_what_can_never_run_is_refused_with_the_numbers(n_prompt: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"{n_prompt:,} tokens of prompt and {max_tokens} to come do not fit into 1,024"):
        Scheduler(LIMITS, chunk=512).submit(request("a", n_prompt, max_tokens))
    Scheduler(LIMITS, chunk=512).submit(request("a", 1000, 24))


def test_a_waiting_request_can_be_withdrawn() -> None:
    scheduler = Scheduler(LIMITS, chunk=512)
    scheduler.submit(request("a", 1000))
    scheduler.submit(request("b", 1000))
    admit(scheduler)
    withdrawn = scheduler.withdraw("b")
    assert withdrawn is not None
    assert withdrawn.id == "b"
    assert scheduler.withdraw("a") is None
    assert scheduler.find("b") is None
    running = scheduler.find("a")
    assert running is not None
    scheduler.release(running)
    assert scheduler.is_idle


def test_prefill_is_one_sequence_in_chunks_and_only_its_last_row_gives_logits() -> None:
    scheduler = Scheduler(replace(LIMITS, n_ctx=8192, n_ctx_seq=4096), chunk=512)
    scheduler.submit(request("a", 1300))
    scheduler.submit(request("b", 100))
    admit(scheduler)
    cuts = []
    while (call := scheduler.prefill_call()) is not None:
        (rows,) = call.rows
        cuts.append((rows.seq, rows.pos, len(rows.tokens), rows.outputs))
        assert rows.tokens == list(scheduler.running[rows.seq].tokens[rows.pos : rows.pos + len(rows.tokens)])
        scheduler.evaluated(call)
        if rows.outputs:
            scheduler.running[rows.seq].tokens.append(7)
    assert cuts == [(0, 0, 512, 0), (1, 0, 100, 1), (0, 512, 512, 0), (0, 1024, 276, 1)]


@pytest.mark.parametrize("n_prompt", [513, 530, 575, 576, 577, 1025, 1100])
def test_no_chunk_is_short_when_it_can_be_avoided(n_prompt: int) -> None:
    scheduler = Scheduler(replace(LIMITS, n_ctx=4096, n_ctx_seq=4096), chunk=512)
    scheduler.submit(request("a", n_prompt))
    admit(scheduler)
    lengths = []
    while scheduler.running[0].n_pending > 1:
        call = scheduler.prefill_call()
        assert call is not None
        lengths.append(len(call.rows[0].tokens))
        scheduler.evaluated(call)
    assert sum(lengths) == n_prompt
    assert all(LEAST_CHUNK <= length <= 512 for length in lengths)


def test_decoding_takes_one_row_of_everyone_in_order_of_slots() -> None:
    scheduler = Scheduler(LIMITS, chunk=512)
    for name, n_prompt in (("a", 3), ("b", 1), ("c", 1)):
        scheduler.submit(request(name, n_prompt))
    admit(scheduler)
    assert decode_call(scheduler.ready()) == Call((Rows(1, 0, [0], 1), Rows(2, 0, [0], 1)))  # a prompt of one token is a row like any other
    prefill = scheduler.prefill_call()
    assert prefill is not None
    scheduler.evaluated(prefill)
    scheduler.running[0].tokens.append(42)
    scheduler.release(scheduler.running[1])
    assert decode_call(scheduler.ready()) == Call((Rows(0, 3, [42], 1), Rows(2, 0, [0], 1)))
    scheduler.restart(scheduler.running[0])
    again = scheduler.prefill_call()
    assert again == Call((Rows(0, 0, [0, 1, 2, 42], 1),))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "0 rows"),
        ((Rows(0, 0, [1] * 513, 1),), "513 rows"),
        ((Rows(0, 0, [1] * 5, 5),), "5 output rows"),
        ((Rows(1, 0, [1], 1), Rows(0, 0, [1], 1)), "each once and in order"),
        ((Rows(1, 0, [1], 1), Rows(1, 1, [1], 1)), "each once and in order"),
        ((Rows(4, 0, [1], 1),), "sequence 4, expected 0 to 3"),
        ((Rows(-1, 0, [1], 1),), "sequence -1"),
        ((Rows(0, 0, [1], 2),), "1 rows with 2 outputs"),
        ((Rows(0, 1, [1], 1),), "position 1, the cache goes on at 0"),
        ((Rows(3, 1022, [1, 1, 1], 1),), "1025 tokens, a sequence holds 1024"),
        ((Rows(0, 0, [1, 1000], 1),), "tokens 1 to 1000, the vocabulary has 1000"),
        ((Rows(0, 0, [-1], 1),), "tokens -1 to -1"),
    ],
)
def test_a_call_that_llama_cpp_would_die_of_is_caught(rows: tuple[Rows, ...], words: str) -> None:
    with pytest.raises(BadCall, match=words):
        check_call(Call(rows), LIMITS, lambda seq: 1022 if seq == 3 else 0)
    check_call(Call((Rows(0, 0, [1, 999], 1), Rows(3, 1022, [0, 0], 1))), LIMITS, lambda seq: 1022 if seq == 3 else 0)


sizes = st.tuples(st.integers(1, 300), st.integers(1, 60))
actions = st.lists(st.one_of(sizes, st.integers(0, 30)), max_size=40)


class Driver:
    """Runs a scheduler over a cache that only counts, and checks what must hold at every step."""

    def __init__(self, limits: Limits, chunk: int, mixes: bool, n_rows: int) -> None:
        self.scheduler, self.limits, self.n_rows = Scheduler(limits, chunk, mixes), limits, n_rows
        self.cache = dict.fromkeys(range(limits.n_seq_max), 0)
        self.n_submitted, self.order, self.ended = 0, list[str](), list[str]()

    def submit(self, n_prompt: int, max_tokens: int) -> None:
        candidate = request(str(self.n_submitted), n_prompt, max_tokens)
        if need(candidate) <= self.limits.n_ctx_seq:
            self.scheduler.submit(candidate)
            self.n_submitted += 1

    def cancel(self, name: str) -> None:
        if (running := self.scheduler.find(name)) is not None:
            self.end(running.seq)
        elif (withdrawn := self.scheduler.withdraw(name)) is not None:
            self.ended.append(withdrawn.id)

    def end(self, seq: int) -> None:
        self.ended.append(self.scheduler.running[seq].request.id)
        self.cache[seq] = 0
        self.scheduler.release(self.scheduler.running[seq])

    def step(self) -> None:
        self.order += [sequence.request.id for sequence in admit(self.scheduler)]
        assert self.scheduler.reserved <= self.limits.n_ctx
        assert len(self.scheduler.running) <= self.limits.n_seq_max
        ready = self.scheduler.ready()
        if ready:
            self.run(decode_call(ready))
        call = self.scheduler.prefill_call(self.n_rows)
        if call is not None:
            assert sum(len(rows.tokens) for rows in call.rows) <= min(self.n_rows, self.scheduler.chunk)
            self.run(call)

    def run(self, call: Call) -> None:
        check_call(call, self.limits, self.cache.__getitem__)
        self.scheduler.evaluated(call)
        for rows in call.rows:
            self.cache[rows.seq] += len(rows.tokens)
            sequence = self.scheduler.running[rows.seq]
            sequence.tokens += [1] * rows.outputs
            if sequence.n_generated == sequence.request.max_tokens:
                self.end(rows.seq)


@settings(max_examples=150, deadline=None)
@given(actions=actions, chunk=st.integers(1, 200), n_rows=st.integers(1, 200), split=st.booleans(), mixes=st.booleans())
def test_whatever_comes_reservations_fit_calls_are_right_and_everyone_ends(
    actions: list[tuple[int, int] | int], chunk: int, n_rows: int, split: bool, mixes: bool
) -> None:
    """A pair submits a request of that size; a number cancels the request of that number. Afterwards everything runs to its end."""
    driver = Driver(replace(LIMITS, n_ctx_seq=256 if split else 1024), chunk, mixes, n_rows)
    for action in actions:
        if isinstance(action, tuple):
            driver.submit(*action)
        else:
            driver.cancel(str(action))
        driver.step()
    while not driver.scheduler.is_idle:
        driver.step()
    assert sorted(driver.ended, key=int) == [str(i) for i in range(driver.n_submitted)]
    assert driver.order == sorted(driver.order, key=int)


def test_reading_takes_turns_so_that_the_short_do_not_wait_for_the_long() -> None:
    scheduler = Scheduler(replace(LIMITS, n_ctx=8192, n_ctx_seq=8192), chunk=512)
    for name, n_prompt in (("long", 2000), ("b", 300), ("c", 100)):
        scheduler.submit(request(name, n_prompt))
    admit(scheduler)
    order = []
    while (call := scheduler.prefill_call()) is not None:
        (rows,) = call.rows
        order.append(scheduler.running[rows.seq].request.id)
        scheduler.evaluated(call)
    assert order == ["long", "c", "long", "b", "long", "long"]


def test_prompts_share_a_chunk_where_the_model_gains_by_it() -> None:
    scheduler = Scheduler(replace(LIMITS, n_ctx=8192, n_ctx_seq=8192), chunk=512, mixes=True)
    for name, n_prompt in (("a", 60), ("b", 60), ("c", 600), ("d", 60)):
        scheduler.submit(request(name, n_prompt))
    admit(scheduler)
    call = scheduler.prefill_call()
    assert call is not None
    assert [(rows.seq, len(rows.tokens), rows.outputs) for rows in call.rows] == [(0, 60, 1), (1, 60, 1), (2, 392, 0)]
    scheduler.evaluated(call)
    call = scheduler.prefill_call()
    assert call is not None
    assert [(rows.seq, len(rows.tokens), rows.outputs) for rows in call.rows] == [(2, 208, 1), (3, 60, 1)]


def test_reading_pauses_at_stops_and_waits_for_others() -> None:
    scheduler = Scheduler(replace(LIMITS, n_ctx=8192, n_ctx_seq=8192), chunk=512)
    scheduler.submit(request("a", 1000))
    scheduler.submit(request("b", 700))
    first, second = admit(scheduler)
    first.stops, second.after = [100, 980], (first, 600)
    lengths = []
    while (call := scheduler.prefill_call()) is not None:
        assert [rows.seq for rows in call.rows] == [0]
        lengths.append(len(call.rows[0].tokens))
        scheduler.evaluated(call)
    assert lengths == [100, 512, 368, 20]
    assert scheduler.ready() == []
    second.after = None
    assert scheduler.prefill_call() is not None


def test_drafts_are_rows_that_all_give_logits() -> None:
    scheduler = Scheduler(LIMITS, chunk=512)
    for name in "ab":
        scheduler.submit(request(name, 1))
    admit(scheduler)
    assert decode_call(scheduler.ready(), {0: [5, 6], 1: [7, 8]}) == Call((Rows(0, 0, [0, 5, 6], 3), Rows(1, 0, [0, 7, 8], 3)))


def test_what_is_read_beside_others_takes_no_longer_than_they_may_wait() -> None:
    pace = Pace(512, target=0.1)
    assert pace.rows(0, 1) == 512
    assert pace.rows(4, 1) == EVEN  # nothing was measured yet
    for _ in range(50):
        pace.note_chunk(512, 0.512)  # 1 ms a row
    assert pace.rows(4, 1) == 64
    assert pace.rows(0, 1) == 512
    assert pace.rows(1, 7) == 640  # 0.7 s: more than one chunk
    assert pace.rows(4, 4) == 384
    for _ in range(50):
        pace.note_step(0.03)
    assert pace.rows(4, 1) == 64
    assert pace.rows(4, 4) == 320  # the step itself is a part of the pause
    for _ in range(50):
        pace.note_chunk(64, 0.9)
    assert pace.rows(4, 1) == 16  # longer than wished: whether fewer rows take less is not known yet
    for _ in range(50):
        pace.note_chunk(16, 1.0)
    assert pace.rows(4, 1) == 64  # they do not
    for _ in range(50):
        pace.note_chunk(16, 0.2)
    assert pace.rows(4, 1) == 16  # they do
    for _ in range(50):
        pace.note_chunk(16, 0.001)
    assert pace.rows(4, 1) == 48  # what is known of fewer rows may be old: never so many that they count as even
    for _ in range(50):
        pace.note_chunk(64, 1.28)
        pace.note_chunk(32, 0.32)
    assert pace.rows(4, 1) == LEAST
    assert pace.rows(4, 9) == 80  # more than a second for 64 at once: what fewer rows cost counts
    for _ in range(50):
        pace.note_chunk(64, 0.0064)
    assert pace.rows(4, 1) == 640
    pace.note_chunk(1, 9.0)  # a single row says nothing about chunks
    assert pace.rows(4, 1) == 640
    assert Pace(256, fixed=True).rows(4, 1) == 256


def test_without_flash_attention_few_rows_cost_no_more_each() -> None:
    pace = Pace(256, target=0.1, even=LEAST)
    assert pace.rows(4, 1) == LEAST
    for _ in range(50):
        pace.note_chunk(16, 0.032)
    assert pace.rows(4, 1) == 48
    for _ in range(50):
        pace.note_chunk(48, 0.48)
    assert pace.rows(4, 1) == LEAST  # 0.16 s: there is no cheaper way to go on
    assert pace.rows(4, 5) == 48


def test_who_waited_long_makes_the_others_wait_a_fifth_of_it() -> None:
    pace = Pace(512, target=0.1)
    pace.note_chunk(64, 0.064)
    assert pace.rows(4, 1, waited=0.45) == 64
    assert pace.rows(4, 1, waited=2.5) == 448
    assert pace.rows(4, 9, waited=2.5) == 896
    assert pace.rows(4, 1, waited=500.0) == 1984  # two seconds at most
