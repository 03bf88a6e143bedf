"""Who runs, who waits, and what the next call of llama_decode holds. Knows nothing of a model, so it is tested without one."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from a3b_server.calls import Call, Limits, Rows
from a3b_server.messages import Submit

# CPU flash attention takes another path below this many rows; a last chunk of fewer gives slightly other logits.
LEAST_CHUNK = 64


@dataclass(slots=True)
class Sequence:
    """A request that runs in slot `seq`. tokens: prompt, then what was drawn; `evaluated` of them are in the cache."""

    request: Submit
    seq: int
    tokens: list[int]
    evaluated: int = 0
    n_restarts: int = 0

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.evaluated

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.request.tokens)

    @property
    def reserved(self) -> int:
        """Tokens that the cache must be able to hold for this request."""
        return need(self.request)


def need(request: Submit) -> int:
    """Tokens of cache that a request may come to take."""
    return len(request.tokens) + request.max_tokens


class Scheduler:
    """Owns the invariant that the reservations of all running requests fit into the context together.

    Requests start in the order in which they came: one that does not fit yet holds back those behind it, so none starves.
    Whoever submits makes sure that a request fits at all, and bounds how many wait.
    """

    def __init__(self, limits: Limits, chunk: int) -> None:
        self.limits, self.chunk = limits, min(chunk, limits.n_batch)
        self.waiting: deque[Submit] = deque()
        self.running: dict[int, Sequence] = {}  # by slot, in order of admission
        self._free = list(range(limits.n_seq_max))  # a heap: low slots first, so that running ones stay without gaps

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def reserved(self) -> int:
        return sum(sequence.reserved for sequence in self.running.values())

    def submit(self, request: Submit) -> None:
        """Raises ValueError when the request can never run."""
        if not request.tokens or request.max_tokens < 1 or need(request) > self.limits.n_ctx_seq:
            raise ValueError(
                f"{len(request.tokens):,} tokens of prompt and {request.max_tokens:,} to come do not fit into {self.limits.n_ctx_seq:,}"
            )
        self.waiting.append(request)

    def admit(self) -> list[Sequence]:
        """Starts waiting requests, first come first served, as long as a slot and their tokens are free."""
        started = []
        while self.waiting and self._free and self.reserved + need(self.waiting[0]) <= self.limits.n_ctx:
            request = self.waiting.popleft()
            sequence = Sequence(request, heapq.heappop(self._free), list(request.tokens))
            self.running[sequence.seq] = sequence
            started.append(sequence)
        return started

    def find(self, request_id: str) -> Sequence | None:
        """The running sequence of a request."""
        return next((s for s in self.running.values() if s.request.id == request_id), None)

    def withdraw(self, request_id: str) -> Submit | None:
        """Takes a request out of the queue; None when it does not wait."""
        found = next((request for request in self.waiting if request.id == request_id), None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def release(self, sequence: Sequence) -> None:
        """The sequence is over and its slot is free. The caller has dropped it from the cache."""
        del self.running[sequence.seq]
        heapq.heappush(self._free, sequence.seq)

    def decode_call(self) -> Call | None:
        """One row of every sequence that has only its newest token to evaluate. All rows give logits."""
        ready = sorted((s for s in self.running.values() if s.n_pending == 1), key=lambda s: s.seq)
        if not ready:
            return None
        return Call(tuple(Rows(s.seq, s.evaluated, s.tokens[-1:], 1) for s in ready[: self.limits.n_batch]))

    def prefill_call(self) -> Call | None:
        """The next chunk of the oldest sequence that has more to evaluate. Hybrids gain nothing from mixing it with other rows."""
        sequence = next((s for s in self.running.values() if s.n_pending > 1), None)
        if sequence is None:
            return None
        count = self._cut(sequence.n_pending)
        start = sequence.evaluated
        return Call((Rows(sequence.seq, start, sequence.tokens[start : start + count], int(count == sequence.n_pending)),))

    def _cut(self, pending: int) -> int:
        """Rows of the next chunk, so that no later one is shorter than LEAST_CHUNK where that can be avoided."""
        if pending <= self.chunk:
            return pending
        short = 0 < pending - self.chunk < LEAST_CHUNK
        return max(1, pending - LEAST_CHUNK) if short and self.chunk >= 2 * LEAST_CHUNK else self.chunk

    def evaluated(self, call: Call) -> None:
        """The call was done: its rows are in the cache."""
        for rows in call.rows:
            self.running[rows.seq].evaluated += len(rows.tokens)

    def restart(self, sequence: Sequence) -> None:
        """The cache lost the sequence: evaluate all of its tokens again."""
        sequence.evaluated = 0
        sequence.n_restarts += 1
