"""From a plan to a served model: takes the port, reads the text side of the file, starts the engine, serves until a signal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

from a3b_gguf.errors import UsageError
from a3b_gguf.flows.plan_facts import read_facts
from a3b_gguf.flows.plan_here import refuse_absent_gpus
from a3b_gguf.flows.prompts import chat_template_of, profile_of
from a3b_gguf.gguf_file import GGUFFile, read_gguf
from a3b_gguf.llama.buffers import Buffer
from a3b_gguf.llama.grammar import check_grammar
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.pooling import pooling_of
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.memory.facts import Facts as ModelFacts
from a3b_gguf.planner.check import compare
from a3b_gguf.planner.plan import Plan
from a3b_gguf.prompt import Profile, control_tokens
from a3b_gguf.template import Template, open_template, published_text
from a3b_gguf.units import parse_bytes
from a3b_server.app import create_app
from a3b_server.clip import ClipConfig
from a3b_server.messages import EngineConfig, Facts, StatesConfig
from a3b_server.metrics import Metrics
from a3b_server.process import run_engine
from a3b_server.sampling import Sampling
from a3b_server.serve import listen, serve
from a3b_server.service import Options, Service
from a3b_server.supervisor import GRACE_SECONDS, N_WAITING, Supervisor

SAVING_SECONDS = 60.0  # for gigabytes of texts on their way to a disk
SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Told:
    """What the caller wants to hear: the address, as soon as it is taken; the engine's facts, once the model is loaded."""

    listening: Callable[[str], None]
    ready: Callable[[Facts], None]


@dataclass(frozen=True, slots=True)
class Door:
    """Who is let in, and how. origins: web pages of which origins may ask (CORS), none by default; n_waiting: requests that may wait for a
    slot before others are turned away; states: where texts are kept when the server ends."""

    origins: tuple[str, ...] = ()
    n_waiting: int = N_WAITING
    clip: ClipConfig | None = None
    states: StatesConfig | None = None


@dataclass(frozen=True, slots=True)
class Entrance:
    """What is ready before a plan is: a socket that listens, its base URL, what a plan needs to know of the model, how it is spoken to.
    pools: it makes vectors.
    """

    socket: socket
    url: str
    facts: ModelFacts
    file: GGUFFile
    template: Template
    profile: Profile
    pools: bool


@contextmanager
def open_entrance(model: Path, host: str, port: int) -> Iterator[Entrance]:
    """Checks what is cheap to check, before anything slow is done; clients that come while it is done wait.

    Raises BadInput for a file that is no model, or that does not say how it is spoken to, MachineLacks for a port that is taken.
    """
    facts = read_facts(model)
    file = read_gguf(model)
    pools = pooling_of(file) is not None
    template = _template(file, pools)
    profile = profile_of(file, template)
    with listen(host, port) as taken:
        yield Entrance(taken, address(host, taken.getsockname()[1]), facts, file, template, profile, pools)


def serve_plan(plan: Plan, plan_json: Mapping[str, Any], door: Door, options: Options, told: Told, entrance: Entrance) -> None:
    """Serves the planned model until SIGTERM (returns) or SIGINT (KeyboardInterrupt). plan_json: what GET /plan answers.

    Raises MachineLacks for a GPU that is not there, before anything is loaded.
    """
    refuse_absent_gpus(plan)
    path, metrics = plan.facts.path, Metrics(planned(plan))
    for name, value in plan.environment:  # the engine's process inherits it; what the user has set stands
        os.environ.setdefault(name, value)
    with LlamaLog(limit=1000), load_model(path, plan.load, vocab_only=True) as model:
        config = EngineConfig(path, plan.load, door.clip, entrance.pools, door.states)
        grace = SAVING_SECONDS if door.states else GRACE_SECONDS
        supervisor = Supervisor(run_engine, config, door.n_waiting, make=metrics.generation, grace=grace)
        vocab = Vocab(model)
        service = Service(
            engine=supervisor,
            vocab=vocab,
            template=entrance.template,
            profile=entrance.profile,
            model=SHARD_SUFFIX.sub("", path.stem),
            created=int(path.stat().st_mtime),
            options=options,
            sampling=sampling_of(entrance.file),
            controls=control_tokens(entrance.profile.controls, vocab),
            grammar_fault=partial(check_grammar, vocab),
            metrics=metrics,
            plan=plan_json,
            pools=entrance.pools,
        )
        told.listening(entrance.url)
        serve(create_app(service, supervisor, door.origins), supervisor, entrance.socket, told.ready)


def states_config(folder: Path | None, limit: str) -> StatesConfig | None:
    """The flags --states and --states-limit; the folder is made. Raises UsageError."""
    if folder is None:
        return None
    n_bytes = parse_bytes(limit, "--states-limit")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--states: {folder}: {error.strerror}", "give a folder that can be written") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--states: {folder} cannot be written", "give a folder that can be written")
    return StatesConfig(folder, n_bytes)


def _template(file: GGUFFile, pools: bool) -> Template:
    """The file's chat template. A model that pools needs none: nothing is rendered for it, and a shipped one stands in."""
    if pools and not file.get("tokenizer.chat_template"):
        return open_template(published_text("qwen3.6"))
    return chat_template_of(file)


def planned(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Predicted bytes by kind of llama.cpp's buffers and device, for /metrics."""
    for row in compare(plan, (Buffer("model", "CPU", 0),)).rows:
        yield row.kind, row.device, row.predicted


def address(host: str, port: int) -> str:
    """The base URL for a client."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def sampling_of(file: GGUFFile) -> Sampling:
    """What the model's makers recommend, where the file says it (general.sampling.*, from their generation_config.json).

    Values that a request could not ask for either are left at OpenAI's defaults.
    """
    default = Sampling()
    temperature, top_k = file.get("general.sampling.temp"), file.get("general.sampling.top_k")
    top_p, min_p = file.get("general.sampling.top_p"), file.get("general.sampling.min_p")
    return replace(
        default,
        temperature=temperature if _within(temperature, 0, 2) else default.temperature,
        top_k=top_k if _within(top_k, 0, 1 << 30) else default.top_k,
        top_p=top_p if _within(top_p, 1e-6, 1) else default.top_p,
        min_p=min_p if _within(min_p, 0, 1) else default.min_p,
    )


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
