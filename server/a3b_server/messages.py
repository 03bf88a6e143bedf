"""What the HTTP side and the engine's process tell each other. A pipe message is a command, or a tuple of events.

    HTTP side -> engine      Submit, Cancel, Stop
    engine -> HTTP side      Ready once; Tokens; Finished or Failed once for every Submit; Dead before it goes

An EOF in either direction means that the other process is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from a3b_gguf.llama.buffers import Buffer
from a3b_gguf.llama.params import LoadParams
from a3b_server.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with."""

    model: Path
    params: LoadParams


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine turned out to be once it was loaded.

    n_ctx: tokens that all sequences share; n_ctx_seq: tokens that one may hold; n_moved: expert tensors that were put into RAM.
    """

    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    buffers: tuple[Buffer, ...] = ()
    n_moved: int = 0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt to be continued by at most `max_tokens` tokens."""

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants this request any more. It still ends with Finished."""

    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End now; what runs is cancelled."""


@dataclass(frozen=True, slots=True)
class Ready:
    facts: Facts


@dataclass(frozen=True, slots=True)
class Tokens:
    """One new token of each request named, in the order in which they came. The token that ends a generation is not sent."""

    pairs: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over. n_generated counts every token that was drawn, the one that ended the generation too."""

    id: str
    reason: FinishReason
    n_prompt: int
    n_generated: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be served to its end, through no fault of the client."""

    id: str
    message: str


@dataclass(frozen=True, slots=True)
class Dead:
    """The engine ends and cannot go on; the fields are those of an A3BError."""

    message: str
    hint: str
    exit_code: int


Command = Submit | Cancel | Stop
Event = Ready | Tokens | Finished | Failed | Dead
