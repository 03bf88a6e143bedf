"""Texts that no slot holds any more, in RAM: what keeps to a size, and chats that go on although another request took their slot."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama.sequences import WHOLE, state_size
from a3b_gguf.memory.cache import CHECKPOINTS_OF_A_TEXT, stored_text_bytes
from a3b_gguf.memory.read import facts_of
from a3b_gguf.memory.settings import Settings
from a3b_server.messages import Submit
from a3b_server.saved_texts import MOST_CHECKPOINTS
from a3b_server.text_memory import TextMemory
from a3b_server.text_store import Entry, SavedText
from engine_bench import GREEDY, PARAMS, Bench, assert_greedy, opened, plain_logits
from pooling_models import MEAN, decoder
from serving import serving
from test_prefixes import chat

ONE_SLOT = replace(PARAMS, n_ctx=4096, n_batch=512, n_ubatch=512, n_seq_max=1, n_outputs_max=3, text_bytes=16 << 20)
QUESTION = "What is the capital of Chile?"


def put(memory: TextMemory, first: int, n_bytes: int, n_tokens: int = 10, spared: Entry | None = None) -> bool:
    """Saves a text whose states are n_bytes of `first`."""
    room = memory.room(n_bytes, spared)
    if room is None:
        return False
    room[:] = first
    return memory.save(SavedText(list(range(first, first + n_tokens)), 0, room[: n_bytes - 2], ((5, room[n_bytes - 2 :]),)))


def held(memory: TextMemory) -> list[int]:
    """First tokens of the texts that are there, each with states that nobody has overwritten."""
    for entry in memory.entries.values():
        text = memory.load(entry)
        assert text is not None
        assert set(text.state) | set(text.checkpoints[0][1]) == {entry.tokens[0]}
        assert entry.checkpoints == (5,)
    return sorted(entry.tokens[0] for entry in memory.entries.values())


def named(memory: TextMemory, first: int) -> Entry:
    return next(entry for entry in memory.entries.values() if entry.tokens[0] == first)


def test_what_was_not_used_for_the_longest_time_gives_way() -> None:
    memory = TextMemory(100)
    assert put(memory, 1, 40)
    assert put(memory, 20, 40)
    assert memory.load(named(memory, 1)) is not None
    assert put(memory, 40, 30)
    assert held(memory) == [1, 40]
    assert put(memory, 60, 20), "into the gap between them"
    assert held(memory) == [1, 40, 60]
    assert not put(memory, 80, 101)
    assert held(memory) == [1, 40, 60], "more than there is costs nobody a place"
    assert put(memory, 80, 100)
    assert held(memory) == [80]


def test_a_text_that_is_about_to_be_used_is_spared() -> None:
    memory = TextMemory(100)
    assert put(memory, 1, 40)
    assert put(memory, 20, 40)
    entry = named(memory, 1)
    assert put(memory, 40, 50, spared=entry)
    assert held(memory) == [1, 40]
    assert not put(memory, 60, 70, spared=entry)
    assert held(memory) == [1, 40]


def test_a_text_that_goes_on_from_another_takes_its_place() -> None:
    memory = TextMemory(100)
    assert put(memory, 7, 30, 10)
    assert put(memory, 7, 30, 20)
    assert [len(entry.tokens) for entry in memory.entries.values()] == [20]
    gone = Entry("1", [], 0, ())
    assert memory.load(gone) is None


def test_any_order_of_sizes_keeps_texts_whole() -> None:
    random, memory = np.random.default_rng(3), TextMemory(1000)
    for i in range(500):
        first = 2 + i % 250
        if put(memory, first, int(random.integers(3, 400)), 3):
            assert first in held(memory)
        if memory.entries and random.random() < 0.3:
            memory.load(list(memory.entries.values())[int(random.integers(len(memory.entries)))])


def go_on(bench: Bench, between: str, n_needed: int) -> tuple[tuple[int, ...], list[int], int]:
    """A chat of two turns with another request between them: the second prompt, its answer, tokens of it that were read."""
    first, marks = chat(bench, QUESTION)
    (answer,) = bench.ask(Submit("1", first, 16, GREEDY, marks))
    said = b"".join(map(bench.vocab.piece, answer)).decode()
    bench.ask(Submit("title", bench.text(f"<|im_start|>user\n{between}" * n_needed), 8, GREEDY))
    second, marks = chat(bench, QUESTION, said, "And of Japan?")
    (again,) = bench.ask(Submit("2", second, 16, GREEDY, marks))
    return second, again, len(second) - bench.end("2").n_cached


@pytest.mark.parametrize("n_draft", [0, 2])
@pytest.mark.parametrize("kind", ["hybrid", "plain", "plain, alone"])
def test_a_chat_goes_on_although_its_slot_was_needed(tiny_bf16: Path, tmp_path: Path, kind: str, n_draft: int) -> None:
    """One slot, and between two turns a program asks for a title, as web pages for chats do."""
    path = tiny_bf16 if kind == "hybrid" else decoder(tmp_path / "plain.gguf", tiny_bf16, MEAN)
    params = replace(ONE_SLOT, kv_unified=kind != "plain, alone", reproducible=kind == "plain, alone", n_draft=n_draft)
    with opened(path, params) as bench, plain_logits(bench.context.model, 512) as oracle:
        second, answer, n_read = go_on(bench, "Give this chat a title. ", 20)
        counts = bench.engine.look()
        assert (counts.counts.n_loaded, counts.n_texts) == (1, 2)
        assert n_read < (512 if params.reproducible else 100)
        assert len(second) > 480
        if kind != "plain, alone":
            assert_greedy(oracle, second, answer)
    with opened(path, replace(params, text_bytes=0)) as bench:
        _, plain, n_read = go_on(bench, "Give this chat a title. ", 20)
        assert n_read > 400, "without RAM for it"
        assert not params.reproducible or plain == answer, "with --kv-split the same bits"


@pytest.mark.parametrize("again", [False, True])
def test_guessing_goes_on_with_a_text_that_comes_back(tiny_bf16: Path, again: bool) -> None:
    """By the MTP block, whose cache comes back, too: as often right as where there was a second slot. again: the same turn once more, which
    starts from a checkpoint.
    """
    with opened(tiny_bf16, replace(ONE_SLOT, n_draft=2, n_seq_max=2, n_outputs_max=6), mtp=True) as bench:
        go_on(bench, "Give this chat a title. ", 20)
        wanted = bench.end("2")
    with opened(tiny_bf16, replace(ONE_SLOT, n_draft=2), mtp=True) as bench, plain_logits(bench.context.model, 512) as oracle:
        second, answer, n_read = go_on(bench, "Give this chat a title. ", 20)
        assert n_read < 100
        if again:
            bench.ask(Submit("title", bench.text("<|im_start|>user\nAnother title. " * 20), 8, GREEDY))
            (answer,) = bench.ask(Submit("2", second, 16, GREEDY))
            assert bench.engine.look().counts.n_loaded == 2
            assert len(second) - bench.end("2").n_cached < 100
        end = bench.end("2")
        assert (end.n_drafted, end.n_accepted) == (wanted.n_drafted, wanted.n_accepted)
        assert end.n_accepted > 0
        assert_greedy(oracle, second, answer)


OWN_CACHES = replace(PARAMS, n_ctx=4096, n_batch=512, n_ubatch=512, n_seq_max=2, n_outputs_max=2, kv_unified=False, text_bytes=16 << 20)


@pytest.mark.parametrize("kind", ["hybrid", "plain"])
def test_what_a_slot_is_copied_from_stays_until_it_was_copied(tiny_bf16: Path, tmp_path: Path, kind: str) -> None:
    """llama.cpp copies rows of split caches in the next call only. Two requests at once: one is to be copied from the slot into which the
    other's text would come back.
    """
    path = tiny_bf16 if kind == "hybrid" else decoder(tmp_path / "plain.gguf", tiny_bf16, MEAN)
    with opened(path, OWN_CACHES) as bench, plain_logits(bench.context.model, 512) as oracle:
        words = [bench.text(f"<|im_start|>user\n{word} " + f"{word} and " * 150) for word in ("apple", "train", "river")]
        marks = (len(words[2]) // 2,)
        said = [bench.ask(Submit(str(i), prompt, 4, GREEDY, marks))[0] for i, prompt in enumerate(words)]
        held = {tuple(holding.tokens)[:20]: holding.seq for holding in bench.engine.slots.held({})}
        assert words[0][:20] not in held, "it was pushed out, into RAM"
        forked, goes_on = (*words[2][: marks[0]], *words[1][:40]), (*words[0], *said[0], *bench.text(" and what else?"))
        answers = bench.ask(Submit("forked", forked, 6, GREEDY), Submit("goes on", goes_on, 6, GREEDY))
        assert bench.end("forked").n_cached >= marks[0] - 8
        for prompt, answer in zip((forked, goes_on), answers, strict=True):
            assert_greedy(oracle, prompt, answer)


def test_a_slot_that_was_never_copied_to_is_not_kept(tiny_bf16: Path) -> None:
    """The request that it was copied for is cancelled before any call; there is room for one text only."""
    with opened(tiny_bf16, replace(OWN_CACHES, text_bytes=1_200_000)) as bench, plain_logits(bench.context.model, 512) as oracle:
        prompt = bench.text("<|im_start|>user\napple " + "apple and " * 250)
        marks = (2 * len(prompt) // 5,)
        bench.ask(Submit("0", prompt, 4, GREEDY, marks))
        other = (*prompt[: marks[0]], *bench.text("something else"))
        bench.engine.submit(Submit("1", other, 4, GREEDY))
        bench.engine._admit()
        bench.engine.cancel("1")
        bench.ask(*(Submit(name, bench.text(f"{name} is " * 200), 4, GREEDY) for name in ("two", "three")))
        assert bench.engine.look().n_texts == 1
        (answer,) = bench.ask(Submit("again", other, 4, GREEDY))
        assert bench.end("again").n_cached == marks[0]
        assert_greedy(oracle, other, answer)


def test_a_text_too_large_for_the_memory_is_read_again(tiny_bf16: Path) -> None:
    with opened(tiny_bf16, replace(ONE_SLOT, text_bytes=1 << 18)) as bench:
        _, answer, n_read = go_on(bench, "Give this chat a title. ", 20)
        assert len(answer) > 1
        assert n_read > 400
        assert bench.engine.look().counts.n_saved == 0


def test_a_text_takes_what_the_plan_says(tiny_bf16: Path, tmp_path: Path) -> None:
    assert MOST_CHECKPOINTS == CHECKPOINTS_OF_A_TEXT
    for path in (tiny_bf16, decoder(tmp_path / "plain.gguf", tiny_bf16, MEAN)):
        params = replace(ONE_SLOT, n_ctx=512, text_bytes=0)
        with opened(path, params) as bench:
            prompt = tuple((7 * i) % 4000 for i in range(511))
            bench.ask(Submit("1", prompt, 1, GREEDY))
            facts = facts_of(read_gguf(path))
            found = state_size(bench.context, 0, WHOLE) + CHECKPOINTS_OF_A_TEXT * facts.state_bytes
            assert 0 < found - stored_text_bytes(facts, Settings(512)) < 24 * 512


@pytest.mark.parametrize("flags", [(), ("--keep-texts", "0")])
def test_a_served_chat_goes_on_after_a_request_for_a_title(tiny_bf16: Path, flags: tuple[str, ...]) -> None:
    """`a3b serve` with its defaults, one slot; without RAM for texts the chat is read again."""
    chat: list[dict[str, str]] = [{"role": "system", "content": "You are brief. " * 60}, {"role": "user", "content": QUESTION}]

    def turn(client: openai.OpenAI, messages: list[dict[str, str]]) -> tuple[str, int, int]:
        answer = client.chat.completions.create(
            model=tiny_bf16.stem, messages=messages, max_tokens=12, temperature=0, extra_body={"enable_thinking": False},  # type: ignore[arg-type]
        )  # fmt: skip
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return answer.choices[0].message.content or "", usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    with serving(tiny_bf16, "--no-dry-run", *flags) as served:
        with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            said, n_first, _ = turn(client, chat)
            assert n_first > 300
            turn(client, [{"role": "user", "content": "Write a title for this: " + "the capital of a country " * 30}])
            _, n_prompt, n_cached = turn(client, [*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "And Japan?"}])
        assert served.end(signal.SIGTERM) == 0
    assert n_cached < 20 if flags else n_prompt - n_cached < 60
