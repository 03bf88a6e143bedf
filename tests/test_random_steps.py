"""Chats that come, go on, overlap and are given up at random: every row that a token is drawn from is that of a fresh context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.llama.batch import logits
from a3b_gguf.llama.params import LoadParams
from a3b_server.messages import Finished, FinishReason, Submit
from a3b_server.sampling import Sampling
from a3b_server.scheduler import Sequence
from cell_order import cell_order, logits_in_order
from engine_bench import PARAMS, Bench, Logits, Ticks, opened, plain_logits

# Rows differ by rounding between calls of different sizes, by up to 0.1 here; a wrong state by 0.3 to 10. Rounding may also send a token
# to another expert, so a row must be that of one of several right ways to cut the text, or to lay it into the cache.
TOLERANCE = 0.2
SYSTEMS = ("Answer shortly." + " Keep to the facts." * 40, "You are a helpful assistant." * 12, "Be brief.")
WORDS = ("red", "green", "capital", "Chile", "fruit", "count", "weather", "seven", "write", "hello")


@dataclass
class Chat:
    """text: what was said so far; marks: where its turns ended."""

    text: tuple[int, ...]
    marks: tuple[int, ...] = ()


def weather(rng: np.random.Generator) -> Iterator[float]:
    """Seconds between two looks at the clock: now those of a fast machine, now of one that is so busy that a call takes half a minute.

    So every way is gone in which a prompt may be cut and guesses may be found to pay, and a seed always goes the same.
    """
    while True:
        slow = float(rng.choice([1e-4, 1e-3, 1e-2, 0.1, 1, 30]))
        for _ in range(int(rng.integers(1, 40))):
            yield slow * float(rng.random())


@dataclass
class Walk:
    """Does something at random at every step, and checks."""

    bench: Bench
    oracle: Logits
    rng: np.random.Generator
    chats: list[Chat] = field(default_factory=list)
    running: dict[str, tuple[Chat, Submit]] = field(default_factory=dict)
    n_submitted: int = 0
    n_checked: int = 0
    n_recut: int = 0
    worst: float = 0.0

    def watch(self) -> None:
        """Compares the row of every first token of a request, and of some others."""
        engine, draw = self.bench.engine, self.bench.engine._draw

        def checked(sequence: Sequence, row: int) -> FinishReason | None:
            if sequence.n_generated == 0 or self.rng.random() < 0.1:
                found = logits(self.bench.context, row, self.bench.vocab.n_tokens)
                self.check(found.copy(), list(sequence.tokens), sequence)
            return draw(sequence, row)

        engine._draw = checked  # type: ignore[method-assign]

    def check(self, found: NDArray[np.float32], tokens: list[int], sequence: Sequence) -> None:
        off: list[float] = []
        for cuts in ([], sequence.stops, range(1, len(tokens))):
            for count in (*cuts, len(tokens)):
                expected = self.oracle(tokens[:count])
            off.append(float(np.abs(found - expected).max()))
            if off[-1] < TOLERANCE:
                break
        if off[-1] >= TOLERANCE:
            order = cell_order(self.bench.context, sequence.seq)
            off.append(float(np.abs(found - logits_in_order(self.bench.context.model, tokens, order)).max()))
        self.worst, self.n_checked, self.n_recut = max(self.worst, off[-1]), self.n_checked + 1, self.n_recut + len(off) - 1
        assert off[-1] < TOLERANCE, f"{sequence.request.id}, token {len(tokens)}: {off}"

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.35 and len(self.running) < 8:
            self.say()
        elif dice < 0.42 and self.running:
            self.bench.engine.cancel(str(self.rng.choice(list(self.running))))
        else:
            self.bench.engine.step()
        self.collect()

    def say(self) -> None:
        if not self.chats or self.rng.random() < 0.3:
            system = self.bench.text(f"<|im_start|>system\n{self.rng.choice(SYSTEMS)}<|im_end|>\n")
            self.chats = [*self.chats[-5:], Chat(system, (len(system),))]
        chat = self.chats[int(self.rng.integers(len(self.chats)))]
        words = " ".join(self.rng.choice(WORDS, int(self.rng.integers(1, 60))))
        turn = self.bench.text(f"<|im_start|>user\n{words}<|im_end|>\n")
        generation = self.bench.text("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        prompt, marks = chat.text + turn, (*chat.marks, len(chat.text) + len(turn))
        if len(prompt) > 700:
            self.chats.remove(chat)
            return
        sampling = Sampling(temperature=float(self.rng.choice([0.0, 1.0])), seed=self.n_submitted)
        request = Submit(str(self.n_submitted), prompt + generation, int(self.rng.integers(1, 30)), sampling, marks)
        self.running[request.id] = (Chat(prompt, marks), request)
        self.n_submitted += 1
        self.bench.engine.submit(request)

    def collect(self) -> None:
        """A chat whose answer is there goes on from it, with the think block dropped or kept, as templates do."""
        for event in self.bench.events:
            if isinstance(event, Finished):
                chat, request = self.running.pop(event.id)
                start = request.tokens if self.rng.random() < 0.3 else chat.text + self.bench.text("<|im_start|>assistant\n")
                said = (*start, *self.bench.tokens(event.id), *self.bench.text("<|im_end|>\n"))
                if len(said) < 650:
                    self.chats.append(Chat(said, chat.marks))
        if not self.running:
            self.bench.events.clear()
        else:
            self.bench.events[:] = [event for event in self.bench.events if not isinstance(event, Finished)]


def walk(path: Path, params: LoadParams, n_steps: int, seed: int, always: bool = True) -> Walk:
    """always: guesses are made whether they pay or not."""
    clock = Ticks(weather(np.random.default_rng((seed, 1))).__next__)
    with opened(path, params, params.n_draft > 0, always, clock) as bench, plain_logits(bench.context.model) as oracle:
        found = Walk(bench, oracle, np.random.default_rng(seed))
        found.watch()
        for _ in range(n_steps):
            found.step()
        while not bench.engine.scheduler.is_idle:
            bench.engine.step()
        found.collect()
        assert not found.running
        counts = bench.engine.look().counts
        assert counts.n_restarted == 0
        assert counts.n_continued + counts.n_copied > 0
        assert counts.n_loaded > 0
        return found


def crowded(n_draft: int) -> LoadParams:
    """Little room: idle texts are evicted, checkpoints pushed out, requests wait for each other; a few texts are kept without a slot."""
    rows = 3 * (1 + n_draft)
    return replace(
        PARAMS, n_ctx=1280, n_seq_max=3, n_draft=n_draft, n_outputs_max=rows, checkpoint_bytes=6 * 220_000, text_bytes=4_000_000
    )  # fmt: skip


def one_each(params: LoadParams) -> LoadParams:
    """A cache for each slot."""
    return replace(params, n_ctx=3072, kv_unified=False)


@pytest.mark.parametrize(("n_draft", "split"), [(0, False), (2, False), (0, True)])
def test_a_random_walk(tiny_bf16: Path, n_draft: int, split: bool) -> None:
    params = one_each(crowded(n_draft)) if split else crowded(n_draft)
    found = walk(tiny_bf16, params, 120, 11 + n_draft)
    assert found.n_checked > 25


@pytest.mark.prove
@pytest.mark.parametrize("cache", ["shared", "own", "own, alone"])
@pytest.mark.parametrize("n_draft", [0, 2])
def test_a_thousand_random_steps(tiny_bf16: Path, n_draft: int, cache: str) -> None:
    params = crowded(n_draft) if cache == "shared" else replace(one_each(crowded(n_draft)), reproducible=cache == "own, alone")
    found = walk(tiny_bf16, params, 1000, 5)
    assert found.n_checked > 200
    assert found.n_recut <= 6
