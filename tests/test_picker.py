"""How tokens are chosen: samplers, grammars, logprobs, the think budget, time limits."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.llama.candidates import Candidates
from a3b_gguf.llama.grammar import MOST_NESTED, GrammarState, check_grammar
from a3b_server.messages import Failed, Submit, ThinkBudget, TokenLogprobs, Tokens
from a3b_server.picker import logprobs
from a3b_server.sampling import Grammar, Sampling
from engine_bench import GREEDY, PARAMS, QUESTIONS, Bench, Logits, opened, plain_logits

JSON = r'''root ::= "{" ws pair ("," ws pair)* "}"
pair ::= string ":" ws (string | number | "true" | "null")
string ::= "\"" [a-zA-Z0-9 _.-]{1,12} "\""
number ::= "-"? [0-9]{1,5}
ws ::= " "?
'''
WILD = Sampling(temperature=1.5, seed=5)


@pytest.fixture(scope="module")
def shared(tiny_bf16: Path) -> Iterator[Bench]:
    with opened(tiny_bf16, PARAMS) as bench:
        yield bench


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    found = Bench(shared.context, shared.vocab, PARAMS)
    yield found
    found.engine.close()


@pytest.fixture(scope="module")
def oracle(shared: Bench) -> Iterator[Logits]:
    with plain_logits(shared.context.model) as logits:
        yield logits


def said(bench: Bench, sampling: Sampling, question: str = QUESTIONS[2], max_tokens: int = 30) -> list[int]:
    return bench.answer(bench.prompt(question), sampling=sampling, max_tokens=max_tokens)[0]


def text(bench: Bench, tokens: list[int]) -> str:
    return b"".join(map(bench.vocab.piece, tokens)).decode()


def test_bias_forbids_and_forces(bench: Bench) -> None:
    usual = said(bench, GREEDY)
    without = said(bench, replace(GREEDY, logit_bias=((usual[0], -100.0),)))
    assert without[0] != usual[0]
    forced = said(bench, replace(GREEDY, logit_bias=((1234, 100.0),)), max_tokens=5)
    assert forced == [1234] * 5
    assert said(bench, replace(WILD, logit_bias=((1234, 100.0),)), max_tokens=5) == [1234] * 5


def test_ignoring_the_end_goes_on_to_the_limit(bench: Bench) -> None:
    assert bench.end("0").reason == "stop" if said(bench, GREEDY) else False
    tokens = said(bench, replace(GREEDY, ignore_eos=True), max_tokens=60)
    assert len(tokens) == 60
    assert not any(map(bench.vocab.is_eog, tokens))
    assert bench.end("0").reason == "length"


def test_penalties_equal_their_formula(bench: Bench, oracle: Logits) -> None:
    """llama.cpp's sampler over the prompt's last 64 tokens and the answer, against the formula computed here."""
    prompt = bench.prompt("Name a fruit.")
    wanted = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7, ignore_eos=True)
    (tokens,) = bench.answer(prompt, sampling=wanted, max_tokens=12)
    for i, token in enumerate(tokens):
        before = [*prompt, *tokens[:i]]
        row = oracle(before)
        for one, count in Counter(before[-64:]).items():
            row[one] = row[one] / 1.3 if row[one] > 0 else row[one] * 1.3
            row[one] -= count * 0.4 + 0.7
        row[list(bench.vocab.eog_tokens)] = -np.inf
        assert row[token] >= row.max() - 0.05


def test_looking_back_at_all_is_more_than_at_the_last_few(bench: Bench) -> None:
    base = replace(GREEDY, frequency_penalty=1.5, ignore_eos=True)
    some, every, none = (said(bench, replace(base, penalty_last_n=n), max_tokens=40) for n in (1, -1, 0))
    assert none == said(bench, replace(GREEDY, ignore_eos=True), max_tokens=40)
    assert len(set(every)) > len(set(some))


def test_dry_breaks_repetitions(bench: Bench) -> None:
    base = replace(GREEDY, logit_bias=((1000, 60.0), (1001, 59.0)))
    stuck = said(bench, base, max_tokens=30)
    freed = said(bench, replace(base, dry_multiplier=50.0), max_tokens=30)
    assert stuck == [1000] * 30
    assert 1001 in freed


def test_each_step_narrows_the_draw(bench: Bench, oracle: Logits) -> None:
    prompt = bench.prompt(QUESTIONS[2])
    row = oracle(list(prompt)).astype(np.float64)
    order = np.argsort(row)[::-1]
    hot = Sampling(temperature=8.0)

    def firsts(**change: float) -> set[int]:
        requests = [Submit(str(i), prompt, 1, replace(hot, seed=i, ignore_eos=True, **change)) for i in range(40)]  # type: ignore[arg-type]
        return {answer[0] for answer in bench.ask(*requests)}

    free = firsts()
    assert len(free) > 10
    assert firsts(top_k=3) <= set(order[:3].tolist())
    surprise = np.log(np.exp(row - row.max()).sum()) + row.max() - row
    typical = np.argsort(np.abs(surprise - (np.exp(-surprise) * surprise).sum()))  # https://arxiv.org/abs/2202.00666
    n_kept = int((np.cumsum(np.exp(-surprise[typical])) < 0.3).sum()) + 1
    assert n_kept < 4000
    assert firsts(typical_p=0.3) <= set(typical[: n_kept + 5].tolist())
    assert firsts(min_p=0.999999) == {order[0]}
    assert order[0] not in firsts(top_k=3, xtc_probability=1.0, xtc_threshold=0.01)


@pytest.mark.parametrize("sampling", [GREEDY, WILD, replace(WILD, top_k=40, top_p=0.95)])
def test_a_grammar_is_followed_whatever_the_model_would_say(bench: Bench, sampling: Sampling) -> None:
    wanted = replace(sampling, grammar=Grammar(JSON))
    for seed in range(4):
        found = text(bench, said(bench, replace(wanted, seed=seed), max_tokens=120))
        if bench.end("0").reason == "stop":
            assert isinstance(json.loads(found), dict)
        else:
            assert found.startswith("{")


def test_a_grammar_that_the_answer_follows_anyway_changes_nothing(bench: Bench) -> None:
    usual = said(bench, GREEDY)
    assert said(bench, replace(GREEDY, grammar=Grammar("root ::= [^\\x00]*"))) == usual
    assert said(bench, replace(WILD, grammar=Grammar("root ::= [^\\x00]*"))) == said(bench, WILD)


def test_a_grammar_at_its_end_ends_the_answer(bench: Bench) -> None:
    wanted = replace(GREEDY, grammar=Grammar('root ::= "yes" | "no"'))
    assert text(bench, said(bench, wanted)) in ("yes", "no")
    assert bench.end("0").reason == "stop"
    assert bench.answer(bench.prompt("Hi."), sampling=replace(wanted, ignore_eos=True)) != []
    assert bench.last("0") == Failed("0", "the grammar allows nothing more")


def test_a_lazy_grammar_sleeps_until_its_trigger(bench: Bench) -> None:
    usual = said(bench, GREEDY, QUESTIONS[0])
    never = Grammar(JSON, triggers=(r"[\s\S]*?(\{[\s\S]*)",))
    assert said(bench, replace(GREEDY, grammar=never), QUESTIONS[0]) == usual
    first = text(bench, usual[:1])
    assert re.fullmatch(r"[A-Za-z ]+", first)
    wakes = Grammar(f'root ::= "{first}" [0-9]+ "!"', triggers=(f"({re.escape(first)}[\\s\\S]*)",))
    found = text(bench, said(bench, replace(GREEDY, grammar=wakes), QUESTIONS[0]))
    assert re.match(re.escape(first) + r"[0-9]", found)
    clashes = Grammar('root ::= "0"', triggers=(re.escape(first),))
    bench.answer(bench.prompt(QUESTIONS[0]), sampling=replace(GREEDY, grammar=clashes))
    assert bench.last("0") == Failed("0", "what was written when the grammar took hold does not fit to it")


def test_a_trigger_in_the_middle_of_letters_beyond_ascii(bench: Bench) -> None:
    state = GrammarState(Grammar('root ::= "é" "x"+', triggers=("(é[\\s\\S]*)",)), bench.vocab)
    candidates = Candidates(bench.vocab.n_tokens)
    for token in bench.vocab.tokenize("Santé", False):
        assert state.allows(token, candidates)
        assert state.accept(token, candidates)
    assert state.is_awake
    assert state.allows(bench.vocab.tokenize("x", False)[0], candidates)
    assert not state.allows(bench.vocab.tokenize("y", False)[0], candidates)
    state.close()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("root ::= ("), "cannot be read"),
        (Grammar('root ::= "a"', root="answer"), "no rule 'answer'"),
        (Grammar("root ::= root | root"), "cannot be read"),
        (Grammar("root ::= " + "(" * 200_000), f"{MOST_NESTED} brackets"),
        (Grammar('root ::= "\0"'), "NUL"),
        (Grammar('root ::= "a"', triggers=("(",)), "no regular expression"),
    ],
)
def test_a_grammar_that_cannot_be_used_fails_its_request_alone(bench: Bench, grammar: Grammar, words: str) -> None:
    fault = check_grammar(bench.vocab, grammar)
    assert fault is not None
    assert words in fault
    ask = Submit("bad", bench.prompt("Hi."), 5, replace(GREEDY, grammar=grammar))
    bench.ask(ask, Submit("good", bench.prompt("Hi."), 5, GREEDY))
    assert bench.last("bad") == Failed("bad", fault)
    assert bench.end("good").n_generated
    assert check_grammar(bench.vocab, Grammar(JSON)) is None


def test_logprobs_are_those_of_the_model(bench: Bench, oracle: Logits) -> None:
    prompt = bench.prompt(QUESTIONS[0])
    bench.ask(Submit("a", prompt, 4, replace(WILD, n_logprobs=3)), Submit("b", bench.prompt("Hi."), 4, GREEDY))
    told: list[tuple[int, TokenLogprobs]] = []
    for event in bench.events:
        if isinstance(event, Tokens):
            for (name, token), one in zip(event.pairs, event.logprobs or (None,) * len(event.pairs), strict=True):
                assert (one is None) == (name == "b")
                if one is not None:
                    told.append((token, one))
    assert len(told) == len(bench.tokens("a"))
    for i, (token, one) in enumerate(told):
        row = oracle([*prompt, *bench.tokens("a")[:i]]).astype(np.float64)
        expected = row - row.max() - math.log(np.exp(row - row.max()).sum())
        assert one.logprob == pytest.approx(expected[token], abs=0.05)
        assert one.top[0][0] == expected.argmax()
        assert [value for _, value in one.top] == pytest.approx(sorted(expected)[::-1][:3], abs=0.05)


def test_logprobs_of_a_row_add_up_to_one() -> None:
    row = np.random.default_rng(1).normal(0, 5, 5000).astype(np.float32)
    found = logprobs(row, 17, 20)
    every = logprobs(row, 17, 5000)
    assert sum(math.exp(value) for _, value in every.top) == pytest.approx(1, abs=1e-5)
    assert found.top == every.top[:20]
    assert found.logprob == dict(every.top)[17]
    assert logprobs(row, 17, 0).top == ()


def thinking(bench: Bench, budget: ThinkBudget | None, max_tokens: int = 40) -> list[int]:
    prompt = bench.text("<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n<think>\n")
    return bench.ask(Submit("t", prompt, max_tokens, replace(GREEDY, ignore_eos=True), think=budget))[0]


def test_a_think_block_that_grows_too_long_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = thinking(bench, None)
    close = bench.text("\n</think>\n\n")
    assert thinking(bench, ThinkBudget(1000, close)) == usual
    early = thinking(bench, ThinkBudget(2, close))
    assert early[:2] == usual[:2]
    assert tuple(early[2 : 2 + len(close)]) == close
    assert len(early) == 40
    assert thinking(bench, ThinkBudget(2, close), max_tokens=4) == [*usual[:2], *close[:2]]
    closed = next(i for i in range(len(usual)) if b"</think>" in b"".join(map(bench.vocab.piece, usual[: i + 1])))
    assert thinking(bench, ThinkBudget(closed + 2, close)) == usual  # it ended in time by itself


def test_a_request_ends_when_its_time_is_over(bench: Bench) -> None:
    prompt = bench.prompt("Hi.")
    endless = replace(GREEDY, ignore_eos=True)
    started = bench.clock.now
    for i in range(6):  # four slots: two wait
        bench.engine.submit(Submit(str(i), prompt, 200, endless, time_limit_s=5.0 if i in (1, 5) else None))
    for _ in range(4):
        bench.engine.step()
    bench.clock.now = started + 4.9
    bench.engine.step()
    assert bench.engine.scheduler.find("1") is not None
    bench.clock.now = started + 5.1
    bench.engine.step()
    assert (bench.end("1").reason, bench.end("5").reason, bench.end("5").n_generated) == ("time", "time", 0)
    bench.run()
    assert [bench.end(str(i)).reason for i in (0, 2, 3, 4)] == ["length"] * 4
