"""The engine on the embedded model: against a loop of our own over llama_cpp, and in its process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.batch import last_position
from a3b_server import engine as engine_module
from a3b_server.messages import EngineConfig, Failed, Finished, Submit, Tokens
from a3b_server.pace import Pace
from a3b_server.process import run_engine
from a3b_server.sampling import Sampling
from a3b_server.supervisor import EngineUnavailable, Supervisor
from engine_bench import GREEDY, PARAMS, QUESTIONS, Bench, Calls, Logits, assert_greedy, opened, plain_logits


@pytest.fixture(scope="module")
def shared(tiny_bf16: Path) -> Iterator[Bench]:
    with opened(tiny_bf16, PARAMS) as bench:
        yield bench


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    found = Bench(shared.context, shared.vocab, PARAMS)
    yield found
    found.engine.close()
    assert [last_position(found.context, seq) for seq in range(4)] == [-1] * 4  # nothing is left in the cache, whatever happened


@pytest.fixture(scope="module")
def oracle(shared: Bench) -> Iterator[Logits]:
    with plain_logits(shared.context.model) as logits:
        yield logits


def test_greedy_equals_a_plain_loop(bench: Bench, oracle: Logits) -> None:
    prompt = bench.prompt(QUESTIONS[0])
    (answer,) = bench.answer(prompt)
    plain: list[int] = []
    while len(plain) < 24 and not (plain and bench.vocab.is_eog(plain[-1])):
        plain.append(int(oracle([*prompt, *plain]).argmax()))
    assert answer == [token for token in plain if not bench.vocab.is_eog(token)]
    assert answer


def test_eight_at_once_are_each_right(bench: Bench, oracle: Logits) -> None:
    prompts = [bench.prompt(question) for question in QUESTIONS]
    answers = bench.answer(*prompts)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert_greedy(oracle, prompt, answer)
        end = bench.last(str(i))
        assert isinstance(end, Finished)
        assert end.n_prompt == len(prompt)
        assert (end.reason, end.n_generated) in (("stop", len(answer) + 1), ("length", 24))


def test_a_long_prompt_is_read_in_chunks_beside_those_who_decode(bench: Bench, oracle: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine, "_pace", Pace(512, target=0.0))  # whoever writes bears no pause at all
    long = tuple(bench.vocab.tokenize("The capital of Chile is Santiago. " * 60, True))[:420] + bench.prompt(QUESTIONS[0])
    short = bench.prompt(QUESTIONS[1])
    answers = bench.answer(short, long, max_tokens=12)
    assert_greedy(oracle, short, answers[0])
    assert_greedy(oracle, long, answers[1])
    first = [event.pairs for event in bench.events if isinstance(event, Tokens)]
    assert [[who for who, _ in pairs] for pairs in first[:4]] == [["0"], ["0"], ["0"], ["0"]]  # the long one did not hold it up


def test_length_ends_a_request_at_its_limit(bench: Bench) -> None:
    (answer,) = bench.answer(bench.prompt(QUESTIONS[0]), max_tokens=2)
    assert len(answer) == 2
    assert bench.last("0") == Finished("0", "length", len(bench.prompt(QUESTIONS[0])), 2)


def test_the_token_that_ends_a_generation_is_counted_and_not_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = bench.prompt(QUESTIONS[0])
    (answer,) = bench.answer(prompt)
    monkeypatch.setattr(bench.vocab, "is_eog", lambda token: token == answer[2])
    (shorter,) = bench.answer(prompt)
    assert shorter == answer[: answer.index(answer[2])]
    assert bench.last("0") == Finished("0", "stop", len(prompt), len(shorter) + 1)


def test_the_same_seed_gives_the_same_answer_and_another_does_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.vocab, "is_eog", lambda token: False)
    prompt = bench.prompt(QUESTIONS[0])
    wild = Sampling(temperature=2.0, seed=7)
    (first,), (again,), (other,) = (bench.answer(prompt, sampling=s) for s in (wild, wild, replace(wild, seed=8)))
    assert first == again
    assert first != other
    assert bench.answer(prompt, sampling=replace(wild, top_k=1)) == bench.answer(prompt)


def test_cancelling_frees_slot_and_cache_and_disturbs_nobody(bench: Bench, oracle: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.vocab, "is_eog", lambda token: False)
    prompts = [bench.prompt(question) for question in QUESTIONS[:6]]
    for i, prompt in enumerate(prompts):  # four slots: 4 and 5 wait
        bench.engine.submit(Submit(str(i), prompt, 8, GREEDY))
    for _ in range(3):
        bench.engine.step()
    running = bench.engine.scheduler.find("1")
    assert running is not None
    bench.engine.cancel("1")
    bench.engine.cancel("4")
    bench.engine.cancel("no such request")
    assert last_position(bench.context, running.seq) == running.evaluated - 1  # what it read stays, for whoever asks the same
    end = bench.last("1")
    assert isinstance(end, Finished)
    assert (end.reason, end.n_generated) == ("cancelled", len(bench.tokens("1")))
    assert bench.last("4") == Finished("4", "cancelled", len(prompts[4]), 0)
    bench.run()
    for i in (0, 2, 3, 5):
        assert_greedy(oracle, prompts[i], bench.tokens(str(i)))
        assert bench.last(str(i)) == Finished(str(i), "length", len(prompts[i]), 8)


def test_a_request_that_can_never_run_fails_at_once(bench: Bench) -> None:
    bench.engine.submit(Submit("x", (1,) * 2000, 100, GREEDY))
    assert bench.events == [Failed("x", "2,000 tokens of prompt and 100 to come do not fit into 2,048")]


def test_requests_that_exceed_the_context_together_wait_for_each_other(bench: Bench, oracle: Logits) -> None:
    prompts = [bench.prompt(question) for question in QUESTIONS[:4]]
    for prompt, answer in zip(prompts, bench.answer(*prompts, max_tokens=700), strict=True):  # 2,048 hold two of them
        assert_greedy(oracle, prompt, answer[:24])
    ends = [bench.events.index(bench.last(str(i))) for i in range(4)]
    starts = [next(at for at, e in enumerate(bench.events) if isinstance(e, Tokens) and str(i) in dict(e.pairs)) for i in range(4)]
    assert max(starts[:2]) < min(ends)
    assert starts[2] > min(ends[:2])


def results(monkeypatch: pytest.MonkeyPatch, *given: int) -> Calls:
    calls = Calls(*given)
    monkeypatch.setattr(engine_module, "decode", calls)
    return calls


def test_no_room_for_a_chunk_halves_it(bench: Bench, oracle: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = bench.prompt(QUESTIONS[0])
    calls = results(monkeypatch, 1, 1)
    (answer,) = bench.answer(prompt)
    assert_greedy(oracle, prompt, answer)
    n = len(prompt)
    assert calls.rows[:3] == [n, n // 2, n // 4]


def test_no_room_for_a_row_ends_the_youngest_with_length(bench: Bench, oracle: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [bench.prompt(question) for question in QUESTIONS[:2]]
    monkeypatch.setattr(bench.vocab, "is_eog", lambda token: False)
    results(monkeypatch, 0, 0, 0, 0, 1)
    answers = bench.answer(*prompts, max_tokens=9)
    assert len(answers[0]) == 9
    assert_greedy(oracle, prompts[0], answers[0])
    end = bench.last("1")
    assert isinstance(end, Finished)
    assert (end.reason, len(answers[1])) == ("length", end.n_generated)


@pytest.mark.parametrize("result", [2, -2, -3])
def test_a_failed_call_is_repeated_from_the_prompt_once(bench: Bench, oracle: Logits, monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    prompt = bench.prompt(QUESTIONS[0])
    monkeypatch.setattr(bench.vocab, "is_eog", lambda token: False)
    calls = results(monkeypatch, 0, 0, 0, result)
    (answer,) = bench.answer(prompt, max_tokens=6)
    assert len(answer) == 6
    assert_greedy(oracle, prompt, answer)
    assert calls.rows[3:5] == [1, len(prompt) + 3]
    results(monkeypatch, 0, 0, 0, result, 0, result)
    bench.answer(prompt)
    assert bench.last("0") == Failed("0", f"llama.cpp failed twice to compute (result {result})")


def test_a_refused_batch_fails_its_requests_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [bench.prompt(question) for question in QUESTIONS[:2]]
    results(monkeypatch, 0, -1)
    bench.answer(*prompts)
    assert bench.last("0") == Failed("0", "internal error: llama.cpp refused a batch")
    assert isinstance(bench.last("1"), Finished)


def test_a_wrong_call_never_reaches_llama_cpp(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = results(monkeypatch)
    monkeypatch.setattr(engine_module, "last_position", lambda context, seq: 5)
    bench.answer(bench.prompt(QUESTIONS[0]))
    end = bench.last("0")
    assert isinstance(end, Failed)
    assert "position 0, the cache goes on at 6" in end.message
    assert calls.rows == []


def test_logits_that_are_no_numbers_fail_the_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "logits", lambda context, row, n_vocab: np.full(n_vocab, np.nan, np.float32))
    assert bench.answer(bench.prompt(QUESTIONS[0])) == [[]]
    end = bench.last("0")
    assert isinstance(end, Failed)
    assert "not numbers" in end.message


async def collect(supervisor: Supervisor, request: Submit) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for item in supervisor.submit(request).items():
        if isinstance(item, Finished):
            return tokens, item
        tokens.append(item.token)
    raise AssertionError("it never finished")


def test_the_process_answers_and_stops_when_asked(bench: Bench, tiny_bf16: Path) -> None:
    prompt = bench.prompt(QUESTIONS[0])
    (expected,) = bench.answer(prompt)

    async def session() -> None:
        supervisor = Supervisor(run_engine, EngineConfig(tiny_bf16, replace(PARAMS, cpu_expert_layers=(1,))))
        supervisor.start()
        facts = await supervisor.ready()
        assert (facts.n_ctx, facts.n_ctx_seq, facts.n_seq_max, facts.n_moved) == (2048, 2048, 4, 3)
        assert {buffer.kind for buffer in facts.buffers} == {"model", "kv", "recurrent", "compute", "output"}
        tokens, end = await collect(supervisor, Submit("a", prompt, 24, GREEDY))
        assert tokens == expected
        assert end.n_prompt == len(prompt)
        pid = supervisor.pid
        assert pid is not None
        await supervisor.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(session())


def test_stopping_ends_requests_with_an_error_not_with_half_an_answer(bench: Bench, tiny_bf16: Path) -> None:
    async def session() -> None:
        supervisor = Supervisor(run_engine, EngineConfig(tiny_bf16, PARAMS))
        supervisor.start()
        await supervisor.ready()
        prompt = bench.prompt("Count. " * 20)
        working = [
            asyncio.create_task(collect(supervisor, Submit(str(i), prompt, 400, Sampling(temperature=2.0, seed=i)))) for i in range(6)
        ]
        await asyncio.sleep(0)
        await asyncio.gather(supervisor.stop(), supervisor.stop())
        ends = await asyncio.gather(*working, return_exceptions=True)
        assert all(isinstance(end, EngineUnavailable) and "shutting down" in str(end) for end in ends)
        await supervisor.stop()

    asyncio.run(session())


def test_a_model_that_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("# no model")

    async def session() -> None:
        supervisor = Supervisor(run_engine, EngineConfig(tmp_path / "text.gguf", PARAMS))
        supervisor.start()
        with pytest.raises(BadInput, match="invalid magic"):
            await supervisor.ready()
        await supervisor.gone()
        assert supervisor.state == "dead"
        await supervisor.stop()

    asyncio.run(session())
