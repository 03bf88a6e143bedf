"""A server over the fake engine, with a script for every kind of answer that the tests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai

from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama.grammar import check_grammar
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.prompt import PROFILES, control_tokens
from a3b_gguf.template import ChatTemplate, Template
from a3b_server.app import create_app
from a3b_server.messages import EngineConfig, Facts
from a3b_server.metrics import Metrics
from a3b_server.process import run_engine
from a3b_server.sampling import Sampling
from a3b_server.service import Options, Service
from a3b_server.supervisor import Generation, Maker, Supervisor
from fake_engine import Ending, FakeConfig, Script, run_fake
from served import served

MODEL = "tiny"
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
LONG_TEXT = "A long \"quoted\" line \\ of text.\n" * 12
SCRIPTS: dict[str, tuple[str, Ending]] = {
    "capital": ("The capital of Chile is Santiago.", "stop"),
    "think": ("It asks for a capital.\nChile's is Santiago.\n</think>\n\nSantiago.", "stop"),
    "call": ("Let me look.\n" + CALL, "stop"),
    "long call": (CALL.replace("Paris", LONG_TEXT), "stop"),
    "two calls": (CALL + "\n" + CALL.replace("Paris", "Lima"), "stop"),
    "emoji": ("Santé 🙂 日本語 done", "stop"),
    "nothing": ("", "stop"),
    "endless": (" never", "endless"),
    "silent": ("x", "silent"),
    "fail": ("a", "fail"),
    "die": ("a", "die"),
    **{f"say {i}": (f"This is answer number {i}." * (i + 1), "stop") for i in range(8)},
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


@dataclass(frozen=True, slots=True)
class Running:
    """A server that a test talks to."""

    url: str
    client: openai.OpenAI
    service: Service
    supervisor: Supervisor

    def ask(self, content: str, **more: Any) -> Any:
        """A request with one user message, thinking off unless it says otherwise."""
        extra = {"enable_thinking": False, **more.pop("extra_body", {})}
        return self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], extra_body=extra, **more)


def user_turn(vocab: Vocab, content: str) -> tuple[int, ...]:
    return tuple(vocab.tokenize(f"<|im_start|>user\n{content}<|im_end|>", True))


def fake_supervisor(vocab: Vocab, facts: Facts, n_waiting: int = 64, most_deaths: int = 0, make: Maker = Generation) -> Supervisor:
    """The fake engine with SCRIPTS, which is brought back after `most_deaths` deaths."""
    scripts = {user_turn(vocab, name): Script(tuple(vocab.tokenize(text, True)), ending) for name, (text, ending) in SCRIPTS.items()}
    start, user = vocab.tokenize("<|im_start|>user", True)
    (end,) = vocab.tokenize("<|im_end|>", True)
    return Supervisor(run_fake, FakeConfig(scripts, (start, user), end, facts), n_waiting, most_deaths, make)


@contextmanager
def chat_server(
    model: Path, options: Options | None = None, facts: Facts | None = None, n_waiting: int = 64, params: LoadParams | None = None
) -> Iterator[Running]:
    """Serves with the text side of `model` and the fake engine, or with the real one when load parameters are given."""
    with load_model(model, LoadParams(n_ctx=256), vocab_only=True) as loaded:
        vocab, metrics = Vocab(loaded), Metrics()
        if params is not None:
            supervisor = Supervisor(run_engine, EngineConfig(model, params), make=metrics.generation)
        else:
            facts = facts or Facts(n_ctx=4096, n_ctx_seq=1024, n_seq_max=4)
            supervisor = fake_supervisor(vocab, facts, n_waiting, make=metrics.generation)
        with serving(model, vocab, supervisor, options or Options(), metrics) as running:
            yield running


@contextmanager
def serving(model: Path, vocab: Vocab, supervisor: Supervisor, options: Options, metrics: Metrics | None = None) -> Iterator[Running]:
    template = ChatTemplate(read_gguf(model).need("tokenizer.chat_template"))
    service = service_of(supervisor, vocab, template, options, metrics)
    with served(create_app(service, supervisor)) as url:
        key = options.api_keys[0] if options.api_keys else "none"
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as client:
            wait_until_settled(client, url)
            yield Running(url, client, service, supervisor)


def service_of(
    supervisor: Supervisor, vocab: Vocab, template: Template, options: Options | None = None, metrics: Metrics | None = None
) -> Service:
    profile = PROFILES["qwen3.6"]
    return Service(
        engine=supervisor,
        vocab=vocab,
        template=template,
        profile=profile,
        model=MODEL,
        created=0,
        options=options or Options(),
        sampling=Sampling(temperature=0),
        controls=control_tokens(profile.controls, vocab),
        grammar_fault=partial(check_grammar, vocab),
        metrics=metrics or Metrics(),
    )


def wait_until_settled(client: openai.OpenAI, url: str) -> None:
    """Returns when the engine has told whether it is ready; gives up after a number of questions, not of seconds."""
    for _ in range(100_000):
        if client._client.get(f"{url}/health").json()["status"] != "starting":
            return
    raise AssertionError("the engine neither got ready nor died")
