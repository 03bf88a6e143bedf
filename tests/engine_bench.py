"""An engine that is driven by hand on the embedded model, and an oracle for what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import Context, LoadedModel, load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_server.calls import Limits
from a3b_server.drafts import Drafter, PromptLookup
from a3b_server.engine import Engine, Options
from a3b_server.messages import Event, Failed, Finished, Submit, Tokens
from a3b_server.mtp import MtpDrafter
from a3b_server.sampling import Sampling
from a3b_server.saved_texts import SavedTexts
from a3b_server.text_memory import TextMemory

PARAMS = LoadParams(n_ctx=2048, n_seq_max=4, n_batch=128, n_ubatch=128, n_outputs_max=4, checkpoint_bytes=32 << 20)
GREEDY = Sampling(temperature=0)
QUESTIONS = (
    "What is the capital of Chile?", "What is 2 plus 3?", "Name a fruit.", "What is the capital of Japan?",
    "Who are you?", "What is the weather in Paris?", "Say hello.", "What is 7 plus 1?",
)  # fmt: skip
# Rounding differs between a row alone and a row among others; a choice whose margin is below this may fall either way.
NEAR_TIE = 0.05

Logits = Callable[[list[int]], NDArray[np.float32]]


def render(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Ticks:
    """A clock that goes on by tick() seconds whenever it is looked at, whatever the machine does; `now` may be set."""

    def __init__(self, tick: Callable[[], float] = lambda: 0.001) -> None:
        self.now, self._tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self._tick()
        return self.now


class Bench:
    """An engine that is driven by hand, and what it said."""

    def __init__(
        self, context: Context, vocab: Vocab, params: LoadParams, drafter: Drafter | None = None, always: bool = True,
        clock: Ticks | None = None,
    ) -> None:  # fmt: skip
        self.context, self.vocab, self.drafter = context, vocab, drafter
        self.events: list[Event] = []
        limits = Limits(context.n_ctx, context.n_ctx_seq, params.n_seq_max, params.n_batch, params.n_outputs_max, vocab.n_tokens)
        options = Options(params.n_ubatch, params.kv_unified, params.reproducible, params.checkpoint_bytes, always)
        self.clock = clock or Ticks()
        self.engine = Engine(context, vocab, limits, options, self.events.extend, drafter, self.clock)
        if params.text_bytes:
            self.engine.slots.saved = SavedTexts(context, TextMemory(params.text_bytes), self.engine.slots.checkpoints, drafter)

    def text(self, text: str) -> tuple[int, ...]:
        return tuple(self.vocab.tokenize(text, True))

    def prompt(self, question: str) -> tuple[int, ...]:
        return self.text(render(question))

    def run(self) -> None:
        while not self.engine.scheduler.is_idle:
            self.engine.step()

    def ask(self, *requests: Submit) -> list[list[int]]:
        """Tokens for each request, all submitted at once."""
        self.events.clear()
        for request in requests:
            self.engine.submit(request)
        self.run()
        return [self.tokens(request.id) for request in requests]

    def answer(self, *prompts: tuple[int, ...], max_tokens: int = 24, sampling: Sampling = GREEDY) -> list[list[int]]:
        """Tokens for each prompt, all submitted at once; their names are numbers."""
        return self.ask(*(Submit(str(i), tokens, max_tokens, sampling) for i, tokens in enumerate(prompts)))

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens) for who, token in event.pairs if who == name]

    def last(self, name: str) -> Event:
        """The one event that ended a request, which must be the last that names it."""
        ends = [event for event in self.events if isinstance(event, Finished | Failed) and event.id == name]
        assert len(ends) == 1
        after = self.events[self.events.index(ends[0]) + 1 :]
        assert not any(name == who for event in after if isinstance(event, Tokens) for who, _ in event.pairs)
        return ends[0]

    def end(self, name: str) -> Finished:
        found = self.last(name)
        assert isinstance(found, Finished)
        return found


class Calls:
    """Notes the rows of every call of llama_decode; gives the results that it was told first, then the real ones."""

    def __init__(self, *results: int) -> None:
        self.results, self.rows = list(results), list[int]()

    def __call__(self, context: Context, batch: Batch) -> int:
        self.rows.append(len(batch))
        result = self.results.pop(0) if self.results else 0
        return result or decode(context, batch)


@contextmanager
def opened(path: Path, params: LoadParams, mtp: bool = False, always: bool = True, clock: Ticks | None = None) -> Iterator[Bench]:
    """A bench on a model of its own. mtp: drafts by the MTP block; else, when params ask for drafts, from the text."""
    with ExitStack() as owned:
        owned.enter_context(LlamaLog())
        model = owned.enter_context(load_model(path, replace(params, load_mtp=mtp)))
        context = owned.enter_context(open_context(model, params))
        vocab = Vocab(model)
        drafter: Drafter | None = PromptLookup(params.n_draft) if params.n_draft else None
        if mtp:
            limits = Limits(context.n_ctx, context.n_ctx_seq, params.n_seq_max, params.n_batch, params.n_outputs_max, vocab.n_tokens)
            drafter = MtpDrafter(context, owned.enter_context(open_context(model, params, mtp=True)), limits, params.n_draft)
        bench = Bench(context, vocab, params, drafter, always, clock)
        yield bench
        bench.engine.close()


@contextmanager
def plain_logits(model: LoadedModel, n_ubatch: int = 128) -> Iterator[Logits]:
    """Logits after a list of tokens, evaluated alone by the plainest use of llama_cpp."""
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.flash_attn_type, params.n_threads = 2048, 2048, n_ubatch, 1, 1
    alone = C.llama_init_from_model(model.pointer, params)
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model.pointer))

    seen: list[int] = []

    def logits(tokens: list[int]) -> NDArray[np.float32]:
        nonlocal seen
        if tokens[: len(seen)] != seen or len(tokens) == len(seen):
            C.llama_memory_clear(C.llama_get_memory(alone), True)
            seen = []
        new = tokens[len(seen) :]
        array = (C.llama_token * len(new))(*new)
        assert C.llama_decode(alone, C.llama_batch_get_one(array, len(new))) == 0
        seen = list(tokens)
        return np.ctypeslib.as_array(C.llama_get_logits_ith(alone, -1), (n_vocab,)).copy()

    yield logits
    C.llama_free(alone)


def assert_greedy(logits: Logits, prompt: tuple[int, ...], answer: list[int]) -> None:
    """Every token is the most likely one after those before it, or as likely as the best but for rounding."""
    for i, token in enumerate(answer):
        row = logits([*prompt, *answer[:i]])
        assert row[token] >= row.max() - NEAR_TIE, f"token {i}: {row[token]} is not the largest, {row.max()}"
