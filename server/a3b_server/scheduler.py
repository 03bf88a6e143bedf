"""Who runs, who waits, and what the next call of llama_decode holds. Knows nothing of a model, so it is tested without one."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from a3b_server.calls import Call, Limits, Rows
from a3b_server.messages import Submit

# CPU flash attention takes another path below this many rows; a last chunk of fewer gives slightly other logits, and costs more a row.
LEAST_CHUNK = 64


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that runs in slot `seq`. tokens: prompt, then what was drawn; `evaluated` of them are in the cache.

    stops: counts at which reading pauses, ascending. after: (another sequence, count): nothing is read before that one has read so many
    tokens. n_cached: tokens of the prompt that the cache held. n_exact: leading tokens read in whole aligned chunks. arrived: when the
    request came; waited: seconds from then to the first chunk of its prompt, None before it.
    """

    request: Submit
    seq: int
    tokens: list[int]
    evaluated: int = 0
    n_restarts: int = 0
    stops: list[int] = field(default_factory=list)
    after: tuple[Sequence, int] | None = None
    n_cached: int = 0
    n_exact: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    arrived: float = 0.0
    waited: float | None = None

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

    def __init__(self, limits: Limits, chunk: int, mixes: bool = False) -> None:
        """mixes: a chunk may hold rows of several prompts. Hybrids would compute them one after the other all the same."""
        self.limits, self.chunk, self._mixes = limits, min(chunk, limits.n_batch), mixes
        self.waiting: deque[Submit] = deque()
        self.running: dict[int, Sequence] = {}  # by slot, in order of admission
        self._free = list(range(limits.n_seq_max))  # a heap
        self._turn = 0

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def reserved(self) -> int:
        return sum(sequence.reserved for sequence in self.running.values())

    @property
    def free(self) -> frozenset[int]:
        """Slots that no request runs in."""
        return frozenset(self._free)

    def submit(self, request: Submit) -> None:
        """Raises ValueError when the request can never run."""
        if not request.tokens or request.max_tokens < 1 or need(request) > self.limits.n_ctx_seq:
            raise ValueError(
                f"{len(request.tokens):,} tokens of prompt and {request.max_tokens:,} to come do not fit into {self.limits.n_ctx_seq:,}"
            )
        self.waiting.append(request)

    def next_to_start(self) -> Submit | None:
        """The request that waits longest, when a slot and its tokens are free; it must be started then."""
        if self.waiting and self._free and self.reserved + need(self.waiting[0]) <= self.limits.n_ctx:
            return self.waiting[0]
        return None

    def start(self, seq: int | None = None) -> Sequence:
        """Starts what `next_to_start` named, in a free slot; the lowest when none is given."""
        request = self.waiting.popleft()
        taken = self._free[0] if seq is None else seq
        self._free.remove(taken)
        heapq.heapify(self._free)
        sequence = Sequence(request, taken, list(request.tokens))
        self.running[taken] = sequence
        return sequence

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
        """The sequence is over and its slot is free."""
        del self.running[sequence.seq]
        heapq.heappush(self._free, sequence.seq)

    def ready(self) -> list[Sequence]:
        """Sequences that have only their newest token to evaluate, in order of slots."""
        return sorted((s for s in self.running.values() if s.n_pending == 1 and s.after is None), key=lambda s: s.seq)

    def reading(self) -> list[Sequence]:
        """Sequences whose text is still to be read, the oldest first."""
        return [s for s in self.running.values() if s.n_pending > 1]

    def prefill_call(self, n_rows: int | None = None) -> Call | None:
        """The next chunk of at most n_rows rows of those that have more to evaluate; None when there are none.

        Turn by turn the oldest and the shortest of them: a short prompt does not wait for the end of a long one, and the long one
        moves on whatever comes.
        """
        left = min(self.chunk, n_rows or self.chunk)
        waiting = [s for s in self.reading() if s.after is None]
        if not waiting:
            return None
        self._turn += 1
        first = waiting[0] if self._turn % 2 else min(waiting, key=lambda s: s.n_pending)
        chosen = {first.seq: self._cut(first, left)}
        for other in waiting if self._mixes else ():
            room = left - sum(chosen.values())
            if other is not first and room >= min(LEAST_CHUNK, other.n_pending):
                chosen[other.seq] = min(self._cut(other, room), room)
        return self._call(chosen)

    def _call(self, chosen: Mapping[int, int]) -> Call:
        def rows(sequence: Sequence, count: int) -> Rows:
            start = sequence.evaluated
            return Rows(sequence.seq, start, sequence.tokens[start : start + count], int(count == sequence.n_pending))

        return Call(tuple(rows(self.running[seq], count) for seq, count in sorted(chosen.items())))

    def _cut(self, sequence: Sequence, most: int) -> int:
        """Rows of the next chunk of a sequence, so that no later one is shorter than LEAST_CHUNK where that can be avoided."""
        stop = next((count for count in sequence.stops if count > sequence.evaluated), len(sequence.tokens))
        pending = stop - sequence.evaluated
        if pending <= most:
            return pending
        short = 0 < pending - most < LEAST_CHUNK
        return max(1, pending - LEAST_CHUNK) if short and most >= 2 * LEAST_CHUNK else most

    def evaluated(self, call: Call) -> None:
        """The call was done: its rows are in the cache."""
        for rows in call.rows:
            self.running[rows.seq].evaluated += len(rows.tokens)

    def restart(self, sequence: Sequence) -> None:
        """The cache lost the sequence: evaluate all of its tokens again."""
        sequence.evaluated = sequence.n_exact = 0
        sequence.n_restarts += 1


def decode_call(sequences: Iterable[Sequence], drafts: Mapping[int, list[int]] | None = None) -> Call:
    """The newest token of each sequence and its drafts, by slot; every row gives logits. As many drafts for one as for the other."""
    rows = ((s, [s.tokens[-1], *(drafts or {}).get(s.seq, ())]) for s in sequences)
    return Call(tuple(Rows(s.seq, s.evaluated, tokens, len(tokens)) for s, tokens in rows))
