"""Guessing ahead: who guesses, and whether it pays for a request."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from a3b_server.calls import Call
from a3b_server.scheduler import Sequence

PATTERN = 3  # tokens that must have been seen before, in this order, for what followed them to be guessed again
PROBE_FIRST, PROBE_MOST = 16, 256  # steps without drafts until one is tried again
PROBE_KNOWN = 64  # the first time, once other requests have shown what guessing gives
WEIGHT = 0.1  # of the newest step in the averages
FIXED_COST = 1.3  # what a step with drafts counts where times must not decide, in steps without
RECHECK = 128  # steps with drafts after which one without is measured again


class Drafter(Protocol):
    """Guesses the next tokens. Told of everything that happens to a slot, since it may keep a cache of its own."""

    n_draft: int

    def follow(self, call: Call) -> None:
        """The target's call was done; its hidden rows are there until the next one."""

    def draft(self, sequences: Several[Sequence]) -> dict[int, list[int]]:
        """n_draft tokens for each slot that has a guess."""

    def keep(self, seq: int, n_tokens: int) -> None:
        """The slot's text was cut back to n_tokens."""

    def begin(self, seq: int, source: int | None, n_tokens: int, hidden: NDArray[np.float32] | None) -> None:
        """The slot starts with n_tokens of another, or of itself. hidden: row of the last of them, where a checkpoint had it."""

    def hidden(self, seq: int) -> NDArray[np.float32] | None:
        """Row of the slot's last token, for a checkpoint."""

    def stored_bytes(self, seq: int) -> int:
        """What it takes to guess on when the slot's text comes back from elsewhere; 0 when nothing is worth keeping."""

    def store(self, seq: int, memory: NDArray[np.uint8]) -> None:
        """Writes that, `stored_bytes` of it."""

    def bring_back(self, seq: int, n_tokens: int, stored: NDArray[np.uint8]) -> None:
        """The empty slot holds n_tokens again. stored: what was kept with them, or nothing."""

    def close(self) -> None: ...


class PromptLookup:
    """Guesses that what followed the last few tokens when they occurred before follows them again: quotes, code, lists."""

    def __init__(self, n_draft: int) -> None:
        self.n_draft = n_draft
        self._seen: dict[int, tuple[str, int, dict[tuple[int, ...], int]]] = {}  # by slot: request, tokens read, where patterns ended

    def draft(self, sequences: Several[Sequence]) -> dict[int, list[int]]:
        guesses = ((sequence.seq, self._guess(sequence)) for sequence in sequences)
        return {seq: guess for seq, guess in guesses if len(guess) == self.n_draft}

    def _guess(self, sequence: Sequence) -> list[int]:
        name, n_read, ends = self._seen.get(sequence.seq, ("", 0, {}))
        if name != sequence.request.id:
            n_read, ends = 0, {}
        tokens, n_tokens = sequence.tokens, len(sequence.tokens)
        for end in range(max(n_read, PATTERN), n_tokens):  # the newest pattern itself comes in with the next token
            ends[tuple(tokens[end - PATTERN : end])] = end
        self._seen[sequence.seq] = (sequence.request.id, n_tokens, ends)
        found = ends.get(tuple(tokens[-PATTERN:]))
        return [] if found is None else tokens[found : found + self.n_draft]

    def follow(self, call: Call) -> None: ...

    def keep(self, seq: int, n_tokens: int) -> None: ...

    def begin(self, seq: int, source: int | None, n_tokens: int, hidden: NDArray[np.float32] | None) -> None:
        self._seen.pop(seq, None)

    def hidden(self, seq: int) -> None:
        return None

    def stored_bytes(self, seq: int) -> int:
        return 0

    def store(self, seq: int, memory: NDArray[np.uint8]) -> None: ...

    def bring_back(self, seq: int, n_tokens: int, stored: NDArray[np.uint8]) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Gate:
    """Whether guessing pays for one request: tokens that a step with drafts gives on average, against what it costs."""

    gain: float
    wait: int = 0
    pause: int = PROBE_FIRST

    def opens(self, cost: float) -> bool:
        """Whether the next step shall have drafts. cost: time of such a step, in steps without."""
        if self.gain >= cost:
            return True
        self.wait += 1
        if self.wait < self.pause:
            return False
        self.wait, self.pause = 0, min(2 * self.pause, PROBE_MOST)
        return True

    def note(self, n_accepted: int) -> None:
        """A step was done, and so many drafts were right."""
        self.gain += WEIGHT * (1 + n_accepted - self.gain)


@dataclass(slots=True)
class Costs:
    """What steps take, in seconds, by the number of sequences in them. fixed: times must not decide, for equal answers."""

    fixed: bool = False
    plain: dict[int, float] = field(default_factory=dict)
    drafted: dict[int, float] = field(default_factory=dict)
    since: int = 0

    def of(self, n: int) -> float | None:
        """Time of a step with drafts for n sequences, in steps without; None: a step without must be measured first."""
        if self.fixed:
            return FIXED_COST
        self.since += 1
        if n not in self.plain or self.since > RECHECK:
            return None
        return self.drafted[n] / self.plain[n] if n in self.drafted else 1.0

    def note(self, n: int, seconds: float, drafted: bool) -> None:
        known = self.drafted if drafted else self.plain
        known[n] = seconds if n not in known else known[n] + WEIGHT * (seconds - known[n])
        if not drafted:
            self.since = 0


class Speculation:
    """Owns the choice which sequences get drafts in the next step. always: without asking what it costs."""

    def __init__(self, drafter: Drafter, fixed: bool, always: bool = False) -> None:
        self.drafter, self.costs, self._always = drafter, Costs(fixed), always
        self._gates: dict[str, Gate] = {}  # by request
        self._usual, self._is_known = 1 + drafter.n_draft / 2, False  # gain of all requests, and whether it was measured

    def drafts(self, ready: Several[Sequence]) -> dict[int, list[int]]:
        """Drafts by slot; the others go on by one token."""
        n_draft = self.drafter.n_draft
        fitting = [s for s in ready if s.request.max_tokens - s.n_generated > n_draft]
        if not fitting:
            return {}
        cost = 0.0 if self._always else self.costs.of(len(fitting))
        if cost is None:
            return {}
        wanting = [s for s in fitting if self._gate(s).opens(cost)]
        if self.costs.fixed:  # what others guess must not change a row of one's own
            return {seq: guess for s in wanting for seq, guess in self.drafter.draft([s]).items()}
        return self.drafter.draft(wanting) if wanting else {}

    def note(self, sequence: Sequence, n_accepted: int) -> None:
        sequence.n_drafted += self.drafter.n_draft
        sequence.n_accepted += n_accepted
        self._gate(sequence).note(n_accepted)
        if not self.costs.fixed:  # what others guess must not change what is guessed for one
            self._usual, self._is_known = self._usual + WEIGHT * (1 + n_accepted - self._usual), True

    def forget(self, request_id: str) -> None:
        self._gates.pop(request_id, None)

    def _gate(self, sequence: Sequence) -> Gate:
        pause = PROBE_KNOWN if self._is_known else PROBE_FIRST
        return self._gates.setdefault(sequence.request.id, Gate(self._usual, pause=pause))
