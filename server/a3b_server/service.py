"""What the handlers need to answer: the engine, the model's text side, and the choices of whoever started the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from a3b_gguf.errors import A3BError
from a3b_gguf.llama.sampling import Grammar
from a3b_gguf.prompt import ControlPolicy, ControlTokens, DeveloperPolicy
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.template import Template
from a3b_server.generation import Embedding, Generation
from a3b_server.messages import Embed, Facts, Snapshot, Submit
from a3b_server.metrics import Metrics
from a3b_server.sampling import Sampling
from a3b_server.supervisor import State

SystemPolicy = Literal["optional", "required"]
Thinking = Literal["on", "off", "auto"]
UnknownPolicy = Literal["refuse", "warn"]
Mode = Literal["lenient", "strict"]
MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 20.0


class TextCodec(Protocol):
    """What the server asks of a vocabulary; `a3b_gguf.llama.vocab.Vocab` is one."""

    bos: int
    add_bos: bool
    n_tokens: int

    def tokenize(self, text: str, parse_special: bool, add_special: bool = False) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


class Engine(Protocol):
    """What the server asks of an engine; `Supervisor` is one."""

    facts: Facts | None
    death: A3BError | None

    @property
    def state(self) -> State: ...
    @property
    def n_in_flight(self) -> int: ...
    @property
    def n_restarts(self) -> int: ...
    def submit(self, request: Submit) -> Generation: ...
    def embed(self, request: Embed) -> Embedding: ...
    def cancel(self, request_id: str) -> int: ...
    async def look(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class Options:
    """system: whether a prompt must have a system message. thinking: what holds when a request does not say; auto is the template's way.

    thinking_budget: tokens of reasoning after which the answer must begin, None for no limit. mode: strict refuses warnings too.
    unknown: what becomes of fields that are not known. developer: "system" takes developer messages for system messages. controls:
    what becomes of control tokens' texts in messages. body_seconds: silence in the middle of a body after which it is given up.
    """

    system: SystemPolicy = "optional"
    thinking: Thinking = "auto"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    thinking_budget: int | None = None
    mode: Mode = "lenient"
    unknown: UnknownPolicy = "refuse"
    developer: DeveloperPolicy = "refuse"
    controls: ControlPolicy = "refuse"
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS


@dataclass(frozen=True, slots=True)
class Service:
    """model: its name on the API; created: when its file was made, in seconds since 1970; sampling: for what a request leaves open.

    controls: the vocabulary's control tokens. grammar_fault: what is wrong with a grammar, None when the engine can follow it. pools: the
    model turns texts into vectors and writes none.
    """

    engine: Engine
    vocab: TextCodec
    template: Template
    profile: Profile
    model: str
    created: int
    options: Options
    sampling: Sampling
    controls: ControlTokens
    grammar_fault: Callable[[Grammar], str | None]
    metrics: Metrics = field(default_factory=Metrics)
    plan: Mapping[str, Any] | None = None
    pools: bool = False
