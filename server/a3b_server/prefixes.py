"""Where the text of a new request begins in what the cache holds already: which slot it gets, and how much need not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from a3b_server.checkpoints import Checkpoint, CheckpointPool

WORTH = 64  # tokens that must be saved before a request waits until another one has read them
LEAST_COPY = 8  # tokens for which a copy is made
LEAST_COPY_RECURRENT = 32  # whose state is copied, too
COPIED_A_TOKEN = 64  # tokens of a cache of its own that are copied, at most, to save the reading of one: all of it is copied, not a part
BLOCK = 256


@dataclass(slots=True)
class Holding:
    """What the cache holds in slot `seq`: `tokens`. used: when it was last needed.

    n_exact: leading tokens that were read in whole aligned chunks. coming: for a request that is still reading, the text to be there.
    """

    seq: int
    tokens: list[int] = field(default_factory=list)
    is_idle: bool = True
    used: int = 0
    n_exact: int = 0
    coming: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Start:
    """A request starts in slot `seq` with `n_tokens` that slot `source` holds; None: with nothing.

    checkpoint: its state is to be brought back first. after: (slot, count): better wait until that slot has read so many tokens.
    """

    seq: int
    source: int | None = None
    n_tokens: int = 0
    checkpoint: Checkpoint | None = None
    after: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Reuse:
    """What the cache can do: a recurrent state cannot be cut, so it needs checkpoints.

    aligned: only whole chunks of so many tokens are reused, which gives the same bits as reading them; 0: anything is. n_copied: tokens
    that a copy moves, whatever it is made for; 0 where rows are shared.
    """

    is_recurrent: bool
    checkpoints: CheckpointPool
    aligned: int = 0
    n_copied: int = 0

    @property
    def least_copy(self) -> int:
        """Tokens for which a copy is made: all chats of a model begin with the same few."""
        return max(LEAST_COPY_RECURRENT if self.is_recurrent else LEAST_COPY, self.n_copied // COPIED_A_TOKEN)

    def length(self, prompt: list[int], held: Holding) -> tuple[int, Checkpoint | None]:
        """Tokens of `prompt` that need not be read when `held` is taken over, and the checkpoint for that. At least one is always read."""
        common = min(common_length(prompt, held.tokens), len(prompt) - 1)
        if self.aligned:
            common = min(common, held.n_exact) // self.aligned * self.aligned
        if not self.is_recurrent:
            return common, None
        if not self.aligned and common == len(held.tokens):
            return common, None
        checkpoint = self.checkpoints.find(prompt, common)
        return (checkpoint.n_tokens, checkpoint) if checkpoint else (0, None)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with. Both must be of the same type."""
    most, at = min(len(first), len(second)), 0
    while at < most and first[at : at + BLOCK] == second[at : at + BLOCK]:
        at += BLOCK
    at = min(at, most)
    while at < most and first[at] == second[at]:
        at += 1
    return at


def find_start(prompt: list[int], holdings: Sequence[Holding], reuse: Reuse, into: int | None = None, may_wait: bool = True) -> Start:
    """The best slot among the idle ones, or `into`, and what it starts from.

    An idle slot is taken over when most of it is used again; else what it holds is kept, and copied, as long as another slot is free.
    """
    idle = [held for held in holdings if held.is_idle and into in (None, held.seq)]
    source, n_tokens, checkpoint = None, 0, None
    for held in sorted(holdings, key=lambda h: not h.is_idle):
        count, needed = reuse.length(prompt, held)
        if count > n_tokens:
            source, n_tokens, checkpoint = held, count, needed
    after = _coming(prompt, holdings, n_tokens, reuse.aligned) if may_wait else None
    oldest = min(idle, key=lambda held: (held.used if held.tokens else -1, held.seq))
    if source is None:
        return Start(oldest.seq, after=after)
    takes_over = source in idle and (2 * n_tokens >= len(source.tokens) or len(idle) == 1)
    if not takes_over and n_tokens < reuse.least_copy:
        return Start(oldest.seq, after=after)
    return Start(source.seq if takes_over else oldest.seq, source.seq, n_tokens, checkpoint, after)


def _coming(prompt: list[int], holdings: Sequence[Holding], n_tokens: int, aligned: int) -> tuple[int, int] | None:
    """The slot that is about to read more of the prompt than is there now."""
    best: tuple[int, int] | None = None
    for held in holdings:
        count = min(common_length(prompt, held.coming), len(prompt) - 1)
        count = count // aligned * aligned if aligned else count
        if count >= n_tokens + WORTH and count > len(held.tokens) and (best is None or count > best[1]):
            best = (held.seq, count)
    return best
