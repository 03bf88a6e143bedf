"""What the handlers need to answer: the engine, the model's text side, and the choices of whoever started the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from a3b_gguf.errors import A3BError
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.template import ChatTemplate
from a3b_server.messages import Facts, Submit
from a3b_server.sampling import Sampling
from a3b_server.supervisor import Generation, State

SystemPolicy = Literal["optional", "required"]
Thinking = Literal["on", "off", "auto"]


class TextCodec(Protocol):
    """What the server asks of a vocabulary; `a3b_gguf.llama.vocab.Vocab` is one."""

    bos: int
    add_bos: bool

    def tokenize(self, text: str, parse_special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


class Engine(Protocol):
    """What the server asks of an engine; `Supervisor` is one."""

    state: State
    facts: Facts | None
    death: A3BError | None

    @property
    def n_in_flight(self) -> int: ...
    def submit(self, request: Submit) -> Generation: ...


@dataclass(frozen=True, slots=True)
class Options:
    """system: whether a prompt must have a system message. thinking: what holds when a request does not say; auto is the template's way."""

    system: SystemPolicy = "optional"
    thinking: Thinking = "auto"
    api_keys: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Service:
    """model: its name on the API; created: when its file was made, in seconds since 1970; sampling: for what a request leaves open."""

    engine: Engine
    vocab: TextCodec
    template: ChatTemplate
    profile: Profile
    model: str
    created: int
    options: Options
    sampling: Sampling
