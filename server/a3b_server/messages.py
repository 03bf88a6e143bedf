"""What the HTTP side and the engine's process tell each other. A pipe message is a command, or a tuple of events.

    HTTP side -> engine      Submit, or Embed for models that pool; Cancel, Look, Stop
    engine -> HTTP side      Ready once; Begun, then Tokens; Finished or Failed once for every Submit, Embedded or Failed for every Embed;
                             Snapshot for every Look; Dead before it goes

An EOF in either direction means that the other process is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from a3b_gguf.llama.buffers import Buffer
from a3b_gguf.llama.params import LoadParams
from a3b_server.sampling import Sampling

if TYPE_CHECKING:  # their module imports llama.cpp, which only the engine's process needs
    from a3b_server.clip import ClipConfig, ClipCounts

# time: the request's own time limit passed.
FinishReason = Literal["stop", "length", "cancelled", "time"]


@dataclass(frozen=True, slots=True)
class StatesConfig:
    """Where texts are kept beyond the life of the process, and how many bytes all of them may take."""

    folder: Path
    limit: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with."""

    model: Path
    params: LoadParams
    clip: ClipConfig | None = None
    pools: bool = False  # it answers Embed instead of Submit
    states: StatesConfig | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine turned out to be once it was loaded.

    n_ctx: tokens that all sequences share; n_ctx_seq: tokens that one may hold; n_moved: expert tensors that were put into RAM.
    rss_bytes: RAM that the process holds, mapped pages of the file that were touched among them. n_embd: numbers in a vector of a model
    that pools.
    """

    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    buffers: tuple[Buffer, ...] = ()
    n_moved: int = 0
    load_seconds: float = 0.0
    rss_bytes: int = 0
    n_embd: int = 0


@dataclass(frozen=True, slots=True)
class ThinkBudget:
    """When the think block that the prompt leaves open is not closed after max_tokens tokens, the engine writes `close`."""

    max_tokens: int
    close: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt to be continued by at most `max_tokens` tokens.

    marks: token counts at which another prompt may part from this one: the end of the system message, the start of each generation
    prompt. What a hybrid keeps of its state there need not be read again. time_limit_s: from now, waiting included.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    marks: tuple[int, ...] = ()
    time_limit_s: float | None = None
    think: ThinkBudget | None = None


@dataclass(frozen=True, slots=True)
class Embed:
    """Tokens of texts, each to be turned into a vector."""

    id: str
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants this request any more. It still ends with Finished, or Failed when it was an Embed."""

    id: str


@dataclass(frozen=True, slots=True)
class Look:
    """Tell what you are doing; answered with a Snapshot, in order."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now; what runs is cancelled."""


@dataclass(frozen=True, slots=True)
class Ready:
    facts: Facts


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt was read, and the first token comes. n_cached: as in Finished, for answers that the HTTP side ends before that."""

    id: str
    n_cached: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithm of the probability that the model gave a token, before penalties and samplers, and its likeliest alternatives,
    best first, as (token, logprob); the token itself may be among them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of the requests named, in the order in which they came. The token that ends a generation is not sent.

    logprobs: one entry a pair, None for requests that did not ask; empty when none did.
    """

    pairs: tuple[tuple[str, int], ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __reduce__(self) -> tuple[type[Tokens], tuple[object, ...]]:
        return Tokens, (self.pairs, self.logprobs)  # pickled for every token: by itself a dataclass with slots takes 5.4 us, so 3.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over. n_generated counts every token that was drawn, the one that ended the generation too.

    n_cached: tokens of the prompt that were not evaluated, because the cache held them. n_drafted, n_accepted: tokens guessed ahead,
    and those of them that were right.
    """

    id: str
    reason: FinishReason
    n_prompt: int
    n_generated: int
    n_cached: int = 0
    n_drafted: int = 0
    n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be served to its end, through no fault of the client."""

    id: str
    message: str


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of length 1, in the order of the texts: float32, little-endian."""

    id: str
    vectors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Dead:
    """The engine ends and cannot go on; the fields are those of an A3BError."""

    message: str
    hint: str
    exit_code: int


SlotState = Literal["idle", "waiting", "reading", "writing"]


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot: n_tokens in the cache, of a request that runs or of one that is over. waiting: for another slot to read a common prefix."""

    seq: int
    state: SlotState
    n_tokens: int
    request: str | None = None
    n_prompt: int = 0
    n_generated: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the engine was loaded. n_read: tokens of prompts that were evaluated; n_cached: those that the cache held.

    n_continued, n_copied, n_restored: starts from the same slot, from another one, from a checkpoint (in either). n_evicted: idle texts
    dropped for want of room. n_drafted, n_accepted: tokens guessed ahead, and those that were right. n_restarted: texts read anew because a
    computation failed. n_saved, n_loaded: texts that were kept when they lost their slot, and that came back.
    """

    n_requests: int = 0
    n_read: int = 0
    n_cached: int = 0
    n_generated: int = 0
    n_continued: int = 0
    n_copied: int = 0
    n_restored: int = 0
    n_evicted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_restarted: int = 0
    n_saved: int = 0
    n_loaded: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two calls. checkpoints: how many are held, of how many at most. n_texts: those kept without a slot.

    clip: None unless activations are watched.
    """

    slots: tuple[SlotView, ...]
    n_waiting: int
    checkpoints: tuple[int, int]
    counts: Counts
    n_texts: int = 0
    clip: ClipCounts | None = None


Command = Submit | Embed | Cancel | Look | Stop
Event = Ready | Begun | Tokens | Finished | Failed | Embedded | Snapshot | Dead
