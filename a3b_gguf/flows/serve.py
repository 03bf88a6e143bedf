"""From a plan to a served model: checks the port, reads the text side of the file, starts the engine, serves until a signal."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from a3b_gguf import probe
from a3b_gguf.errors import MachineLacks
from a3b_gguf.flows.plan import plan_file
from a3b_gguf.flows.prompts import chat_template_of, profile_of
from a3b_gguf.gguf_file import GGUFFile, read_gguf
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.machine import Machine
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_server.app import create_app
from a3b_server.messages import EngineConfig, Facts
from a3b_server.process import run_engine
from a3b_server.sampling import Sampling
from a3b_server.serve import listen, serve
from a3b_server.service import Options, Service
from a3b_server.supervisor import Supervisor

SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Told:
    """What the caller wants to hear: the address, as soon as it is taken; the engine's facts, once the model is loaded."""

    listening: Callable[[str], None]
    ready: Callable[[Facts], None]


def plan_here(path: Path, wishes: Wishes, machine: Machine | None = None) -> Plan:
    """As flows.plan.plan_file; the machine at hand is measured in a process of its own.

    Asking a GPU for its memory opens it, which takes some of that memory for as long as the process lives: this one lives long.
    """
    return plan_file(path, wishes, machine or _machine_here())


def _machine_here() -> Machine:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(probe.machine)


def refuse_absent_gpus(plan: Plan) -> None:
    """A plan for a described machine can be read anywhere, but served only where its GPUs are. Raises MachineLacks."""
    used = {term.device for term in plan.terms} - {HOST}
    if plan.machine.described and used:
        found = len(_machine_here().gpus)
        if found < len(used):
            message = f"the plan uses {len(used)} GPU{'s' if len(used) > 1 else ''}, llama.cpp finds {found or 'none'} on this machine"
            raise MachineLacks(message, "leave --vram out to plan for this machine, or say --vram 0; --dry-run only shows the plan")


def serve_plan(plan: Plan, host: str, port: int, options: Options, told: Told) -> None:
    """Serves the planned model until SIGTERM (returns) or SIGINT (KeyboardInterrupt).

    Raises MachineLacks for a GPU that is not there and for a port that is taken, before anything is loaded; BadInput for a file that
    has no chat template.
    """
    refuse_absent_gpus(plan)
    path = plan.facts.path
    with listen(host, port) as socket, LlamaLog(limit=1000):
        file = read_gguf(path)
        template = chat_template_of(file)
        with load_model(path, plan.load, vocab_only=True) as model:
            supervisor = Supervisor(run_engine, EngineConfig(path, plan.load))
            service = Service(
                engine=supervisor,
                vocab=Vocab(model),
                template=template,
                profile=profile_of(file, template),
                model=SHARD_SUFFIX.sub("", path.stem),
                created=int(path.stat().st_mtime),
                options=options,
                sampling=sampling_of(file),
            )
            told.listening(address(host, socket.getsockname()[1]))
            serve(create_app(service, supervisor), supervisor, socket, told.ready)


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
