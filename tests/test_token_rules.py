"""Rules over token ids, with the embedded model's vocabulary: each with a list that breaks it and one that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a3b_gguf.flows.prompts import TextSide, speaker_of, text_side
from a3b_gguf.prompt import PROFILES, RULES, TokenView, verify_tokens
from conversations import GOOD, OFF, TOOL_TURNS

Edit = Callable[[TokenView], TokenView]


@pytest.fixture(scope="module")
def good(tiny_bf16: Path) -> Iterator[TokenView]:
    speaker = speaker_of(tiny_bf16)
    with text_side(speaker) as side:
        yield view_of(side, GOOD)


def view_of(side: TextSide, text: str) -> TokenView:
    return TokenView(side.vocab.tokenize(text, True), PROFILES["qwen3.6"], side.vocab, side.kinds, side.controls, side.eog)


def ids_of(view: TokenView, text: str) -> list[int]:
    return view.vocabulary.tokenize(text, True)


def text_edit(old: str, new: str) -> Edit:
    return lambda view: replace(view, ids=ids_of(view, GOOD.replace(old, new)))


@dataclass(frozen=True, slots=True)
class Other:
    """A vocabulary that differs in what it says about BOS."""

    of: TokenView
    bos: int
    add_bos: bool

    def tokenize(self, text: str, parse_special: bool) -> list[int]:
        return self.of.vocabulary.tokenize(text, parse_special)

    def piece(self, token: int) -> bytes:
        return self.of.vocabulary.piece(token)


def with_bos(view: TokenView, count: int, add_bos: bool) -> TokenView:
    bos = ids_of(view, "<|endoftext|>")[0]
    return replace(view, ids=[*[bos] * count, *view.ids], vocabulary=Other(view, bos, add_bos))


def byte_tokens(view: TokenView) -> TokenView:
    newline = view.vocabulary.tokenize("\n", False)
    at = list(view.ids).index(ids_of(view, "<think>")[0])
    return replace(view, ids=[*view.ids[: at + 1], *newline, *newline])


BROKEN: dict[str, Edit] = {
    "K001": lambda view: replace(view, profile=PROFILES["phi-3.5"]),
    "K002": lambda view: replace(view, ids=[ids_of(view, "\n")[0], *view.ids]),
    "K003": lambda view: with_bos(view, 2, True),
    "K004": lambda view: replace(view, ids=ids_of(view, GOOD.replace("<|im_end|>\n<|im_start|>user", "<|im_start|>user"))),
    "K005": lambda view: replace(view, ids=ids_of(view, GOOD.replace("Hi", "Hi<think>")), apart=view.ids),
    "K006": text_edit("Hi", "Hi <tool_call>"),
    "K007": lambda view: replace(view, ids=[*view.ids, len(view.kinds)]),
    "K008": lambda view: replace(view, ids=[*view.ids, view.vocabulary.tokenize("☃", False)[0]]),  # a byte of a character
    "K009": byte_tokens,
    "K010": text_edit("Hi", "Hi<|endoftext|>"),
    "K011": lambda view: replace(view, kinds=[5 if token == view.ids[4] else kind for token, kind in enumerate(view.kinds)]),
}  # fmt: skip


def rules(view: TokenView) -> set[str]:
    return {finding.rule for finding in verify_tokens(view)}


def test_each_rule_has_its_example() -> None:
    assert {*BROKEN, "K012"} == {rule.id for rule in RULES if rule.id.startswith("K")}  # K012 is a listing and finds nothing


@pytest.mark.parametrize("rule", BROKEN)
def test_what_breaks_a_rule(good: TokenView, rule: str) -> None:
    findings = verify_tokens(BROKEN[rule](good))
    assert rule in {finding.rule for finding in findings}
    assert all(finding.where and finding.message and finding.fix for finding in findings)


@pytest.mark.parametrize("text", [GOOD, OFF, TOOL_TURNS])
def test_published_vectors_pass(good: TokenView, text: str) -> None:
    assert rules(replace(good, ids=ids_of(good, text))) == set()
    assert rules(replace(good, ids=ids_of(good, text), apart=ids_of(good, text))) == set()


def test_bos_where_it_is_wanted(good: TokenView) -> None:
    assert "K003" not in rules(with_bos(good, 1, True))
    assert "K003" in rules(with_bos(good, 1, False))


def test_an_injection_is_told_from_a_merge(good: TokenView) -> None:
    """Issue 24382 of llama.cpp: a control text inside a user's message becomes the token."""
    apart = [*good.vocabulary.tokenize("x", False)]
    (finding,) = [f for f in verify_tokens(replace(good, apart=[*good.ids[:-1], *apart])) if f.rule == "K005"]
    assert finding.severity == "warning" or "control token" in finding.message


def test_the_form_of_the_write_ups_is_letters_to_this_vocabulary(good: TokenView) -> None:
    findings = verify_tokens(BROKEN["K001"](good))
    assert any("<|system|> is" in finding.message and "tokens:" in finding.message for finding in findings)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(-5, 5000) | st.sampled_from([4087, 4088, 4089, 4090, 4094, 4095, 198]), max_size=30))
def test_any_ids_give_findings(good: TokenView, ids: list[int]) -> None:
    for finding in verify_tokens(replace(good, ids=ids)):
        assert finding.where
        assert finding.message
