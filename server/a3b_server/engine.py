"""The engine: every sequence of one context, decoded on one thread. What to run is the scheduler's choice; this runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.batch import Batch, decode, last_position, logits
from a3b_gguf.llama.candidates import Candidates
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.vocab import Vocab
from a3b_server.calls import BadCall, Call, Limits, Rows, check_call
from a3b_server.drafts import Drafter, Speculation
from a3b_server.messages import (
    Begun,
    Counts,
    Event,
    Failed,
    Finished,
    FinishReason,
    SlotState,
    SlotView,
    Snapshot,
    Submit,
    TokenLogprobs,
    Tokens,
)  # fmt: skip
from a3b_server.pace import EVEN, LEAST, Pace
from a3b_server.picker import GrammarEnded, NotNumbers, Picker, logprobs
from a3b_server.prefixes import Holding
from a3b_server.scheduler import LEAST_CHUNK, Scheduler, Sequence, decode_call
from a3b_server.slots import Slots
from a3b_server.thinking import ThinkClock

# Results of llama_decode. Everything else (2: aborted, -2 and -3: failed) leaves the sequences of the call in an unknown state.
DONE, NO_ROOM, REFUSED = 0, 1, -1
MOST_RESTARTS = 1
HELD_SECONDS = 0.01  # tokens that come faster than a hundred a second go out together: telling each costs as much as a tenth of its step

Emit = Callable[[tuple[Event, ...]], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Options:
    """chunk: most rows of a prompt in a call. unified: sequences share one cache. reproducible: a request gets the same bits whatever
    else runs: calls of one sequence and equal cuts. checkpoint_bytes: RAM for states of hybrids. always_draft: without asking whether it
    pays.
    """

    chunk: int
    unified: bool = True
    reproducible: bool = False
    checkpoint_bytes: int = 0
    always_draft: bool = False
    flash_attn: bool = True


class Engine:
    """Owns the sequences of `context`; whoever opened the context closes it. emit is called between two calls of llama_decode.

    Use it from one thread. Requests are submitted and cancelled between steps only, so no call is ever interrupted.
    clock: seconds. It tells when time limits pass and what calls cost, which decides how much of a prompt is read and whether to guess.
    """

    def __init__(
        self, context: Context, vocab: Vocab, limits: Limits, options: Options, emit: Emit, drafter: Drafter | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        self._context, self._vocab, self._limits, self._options, self._emit, self._clock = context, vocab, limits, options, emit, clock
        # llama.cpp would compute rows of several prompts one prompt after the other all the same: llama-batch.cpp, split_equal.
        mixes = options.unified and not (context.model.is_hybrid or options.reproducible)
        self.scheduler = Scheduler(limits, options.chunk, mixes)
        self.slots = Slots(context, limits, options.chunk if options.reproducible else 0, options.checkpoint_bytes, drafter)
        self._speculation = Speculation(drafter, options.reproducible, options.always_draft) if drafter else None
        self._pace = Pace(self.scheduler.chunk, fixed=options.reproducible, even=EVEN if options.flash_attn else LEAST)
        self._batch, self._candidates = Batch(limits.n_batch), Candidates(limits.n_vocab)
        self._pickers: dict[str, Picker] = {}  # these by request
        self._thinking: dict[str, ThinkClock] = {}
        self._deadlines: dict[str, float] = {}
        self._arrivals: dict[str, float] = {}  # of those that wait for a slot
        self._pairs, self._told = list[tuple[str, int]](), list[TokenLogprobs | None]()
        self._events: list[Event] = []
        self._told_at = 0.0  # when tokens last went out

    def submit(self, request: Submit) -> None:
        """Queues a request. One that can never run fails at once."""
        try:
            self.scheduler.submit(request)
        except ValueError as error:
            self._note(Failed(request.id, str(error)))
            self._flush()
            return
        now = self._arrivals[request.id] = self._clock()
        if request.time_limit_s is not None:
            self._deadlines[request.id] = now + request.time_limit_s

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Ends a request, waiting or running; nothing happens when it is over already."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self._finish(sequence, reason)
        elif (request := self.scheduler.withdraw(request_id)) is not None:
            self._forget(request_id)
            self._note(Finished(request.id, reason, len(request.tokens), 0))
        self._flush()

    def step(self) -> None:
        """Admits, then one token (or a few that were guessed) for everyone who generates, then as much of the prompts as they can bear."""
        self._expire()
        self._admit()
        n_writing = self._decode()
        reading = self.scheduler.reading()
        self._flush(may_hold=not reading)
        if not reading:
            return
        left = self._pace.rows(n_writing, len(reading), self._longest_wait(reading))
        n_rows = self._read(left)
        # One call while nobody writes: between two of them is the time for new requests and those that are cancelled.
        while n_writing and n_rows and (left := left - n_rows) >= LEAST_CHUNK:
            n_rows = self._read(left)

    def _read(self, most: int) -> int:
        """One chunk of prompts, of at most so many rows; how many there were."""
        call = self.scheduler.prefill_call(most)
        if call is None:
            return 0
        now = self._clock()
        for rows in call.rows:
            sequence = self.scheduler.running[rows.seq]
            sequence.waited = now - sequence.arrived if sequence.waited is None else sequence.waited
        n_rows, started = sum(len(rows.tokens) for rows in call.rows), self._clock()
        self._run(call)
        self._pace.note_chunk(n_rows, self._clock() - started)
        self._flush()
        return n_rows

    def _longest_wait(self, reading: list[Sequence]) -> float:
        """Seconds that one of these waited before its prompt was begun."""
        now = self._clock()
        return max(now - s.arrived if s.waited is None else s.waited for s in reading)

    def look(self) -> Snapshot:
        """What every slot does, and counts since the start."""
        running = self.scheduler.running
        views = tuple(_view(held, running.get(held.seq)) for held in self.slots.held(running))
        pool = self.slots.checkpoints
        n_texts = len(self.slots.saved) if self.slots.saved else 0
        return Snapshot(views, len(self.scheduler.waiting), (len(pool), pool.n_most), Counts(**self.slots.tally), n_texts)

    def close(self) -> None:
        """Cancels everything and empties the cache."""
        for request in tuple(self.scheduler.waiting):
            self.cancel(request.id)
        for sequence in tuple(self.scheduler.running.values()):
            self.cancel(sequence.request.id)
        self.slots.clear()

    def _expire(self) -> None:
        if self._deadlines:
            now = self._clock()
            for request_id in [name for name, deadline in self._deadlines.items() if deadline <= now]:
                self.cancel(request_id, "time")

    def _admit(self) -> None:
        running = self.scheduler.running
        for sequence in tuple(running.values()):
            if sequence.after is not None and not self.slots.must_wait(sequence, running):
                self.slots.resume(sequence, running)
        while (request := self.scheduler.next_to_start()) is not None:
            try:
                picker = Picker(request, self._vocab, self._candidates, self._limits.n_ctx_seq)
            except UsageError as error:
                self.scheduler.withdraw(request.id)
                self._forget(request.id)
                self._note(Failed(request.id, error.message))
                continue
            start = self.slots.find(list(request.tokens), running)
            sequence = self.scheduler.start(start.seq)
            sequence.arrived = self._arrivals.pop(request.id)
            self._pickers[request.id] = picker
            if request.think is not None:
                self._thinking[request.id] = ThinkClock(request.think)
            self.slots.begin(sequence, start, running)

    def _decode(self) -> int:
        """One step of all who generate; how many there were. Rows with drafts and rows without never share a call."""
        ready = self.scheduler.ready()
        begun = started = self._clock()
        drafts = self._speculation.drafts(ready) if self._speculation and ready else {}
        for group in ([s for s in ready if s.seq in drafts], [s for s in ready if s.seq not in drafts]):
            for sequences in [[s] for s in group] if self._options.reproducible else [group] if group else []:
                self._run(decode_call(sequences, drafts))
                if self._speculation:
                    now = self._clock()
                    self._speculation.costs.note(len(sequences), now - started, sequences[0].seq in drafts)
                    started = now
        if ready:
            self._pace.note_step(self._clock() - begun)
        return len(ready)

    def _run(self, call: Call) -> None:
        """Runs a call and everything that follows from it."""
        try:
            check_call(call, self._limits, lambda seq: last_position(self._context, seq) + 1)
        except BadCall as error:
            self._fail(call, f"internal error: a call was wrong: {error}")
            return
        self._batch.clear()
        last_rows = [self._batch.add(rows.seq, rows.pos, rows.tokens, rows.outputs) for rows in call.rows]
        result = decode(self._context, self._batch)
        if result != DONE:
            self._recover(result, call)
            return
        self.scheduler.evaluated(call)
        sequences = [self.scheduler.running[rows.seq] for rows in call.rows]
        self.slots.evaluated(call, sequences)
        # Everything up to the last roll-back happens before the next call: later it would bring back another state.
        for sequence, rows, last in zip(sequences, call.rows, last_rows, strict=True):
            if rows.outputs:
                self._advance(sequence, rows, last + 1 - rows.outputs)

    def _advance(self, sequence: Sequence, rows: Rows, first: int) -> None:
        """Draws from the logits of the batch's rows from `first` on, as long as what was drawn is what was guessed."""
        guessed = rows.tokens[len(rows.tokens) + 1 - rows.outputs :]
        n_kept = sequence.evaluated - len(guessed)
        for i in range(rows.outputs):
            over = self._draw(sequence, first + i)
            if over or i == len(guessed) or sequence.tokens[n_kept:] != [guessed[i]]:
                break
            n_kept += 1
        if sequence.seq not in self.scheduler.running:  # it failed
            return
        if guessed and self._speculation:
            self._speculation.note(sequence, n_kept - sequence.evaluated + len(guessed))
        if n_kept < sequence.evaluated and not self.slots.roll_back(sequence, n_kept):
            if not over:
                self._start_again(sequence, "drafts cannot be taken back")
                return
            self.slots.drop(sequence.seq)
            sequence.evaluated = 0
        if over:
            self._finish(sequence, over)

    def _draw(self, sequence: Sequence, row: int) -> FinishReason | None:
        """Appends the next token of a sequence; says why it is over, if it is. A request that fails is ended here."""
        request = sequence.request
        row_logits = logits(self._context, row, self._limits.n_vocab)
        try:
            token = self._pickers[request.id].pick(self._context, row, row_logits)
        except NotNumbers:
            self._fail_one(sequence, "the model's logits are not numbers; its file may be damaged")
            return "stop"
        except GrammarEnded as error:
            self._fail_one(sequence, str(error))
            return "stop"
        sequence.tokens.append(token)
        if sequence.n_generated == 1:
            self._note(Begun(request.id, sequence.n_cached))
        if self._vocab.is_eog(token):
            return "stop"
        n_top = request.sampling.n_logprobs
        self._tell(request, token, None if n_top is None else logprobs(row_logits, token, n_top))
        if sequence.n_generated >= request.max_tokens:
            return "length"
        return self._close_thinking(sequence, token)

    def _close_thinking(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Writes the end of a think block whose budget is used up."""
        clock = self._thinking.get(sequence.request.id)
        for written in clock.tick(self._vocab.piece(token)) if clock else ():
            self._pickers[sequence.request.id].write(written)
            sequence.tokens.append(written)
            self._tell(sequence.request, written, None)
            if sequence.n_generated >= sequence.request.max_tokens:
                return "length"
        return None

    def _tell(self, request: Submit, token: int, told: TokenLogprobs | None) -> None:
        self._pairs.append((request.id, token))
        self._told.append(told)

    def _recover(self, result: int, call: Call) -> None:
        """After a call that failed. Source of the results: llama_decode in llama.h, and what memory holds after each was measured."""
        sequences = [self.scheduler.running[rows.seq] for rows in call.rows]
        if result == NO_ROOM:
            self._make_room(call, sequences)
        elif result == REFUSED:
            self._fail(call, "internal error: llama.cpp refused a batch")
        else:
            for sequence in sequences:
                self._start_again(sequence, f"llama.cpp failed twice to compute (result {result})")

    def _start_again(self, sequence: Sequence, why: str) -> None:
        """The cache has lost a sequence. Reads it anew, once; the second time the request fails."""
        self.slots.drop(sequence.seq)
        if sequence.n_restarts < MOST_RESTARTS:
            self.slots.tally["n_restarted"] += 1
            self.scheduler.restart(sequence)
        else:
            self._fail_one(sequence, why)

    def _make_room(self, call: Call, sequences: list[Sequence]) -> None:
        """The cache is full: drop what nobody uses, then drafts, then halve a chunk, else end the youngest request of the call."""
        if self.slots.evict(self.scheduler.running):
            self._run(call)
        elif all(rows.outputs == len(rows.tokens) for rows in call.rows) and any(rows.outputs > 1 for rows in call.rows):
            self._run(decode_call(sequences))
        elif (longest := max(call.rows, key=lambda rows: len(rows.tokens))) and len(longest.tokens) > 1:
            self._run(Call((replace(longest, tokens=longest.tokens[: len(longest.tokens) // 2], outputs=0),)))
        else:
            self._finish([s for s in self.scheduler.running.values() if s in sequences][-1], "length")

    def _fail(self, call: Call, message: str) -> None:
        for rows in call.rows:
            self._fail_one(self.scheduler.running[rows.seq], message)

    def _fail_one(self, sequence: Sequence, message: str) -> None:
        self.slots.drop(sequence.seq)
        self._release(sequence)
        self._note(Failed(sequence.request.id, message))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        self.slots.finish(sequence)
        self._release(sequence)
        counts = (len(request.tokens), sequence.n_generated, sequence.n_cached, sequence.n_drafted, sequence.n_accepted)
        self.slots.tally.update(n_requests=1, n_generated=counts[1], n_drafted=counts[3], n_accepted=counts[4])
        self._note(Finished(request.id, reason, *counts))

    def _release(self, sequence: Sequence) -> None:
        """Frees what a request holds beside the cache."""
        name = sequence.request.id
        self.scheduler.release(sequence)
        self._pickers.pop(name).close()
        self._forget(name)
        if self._speculation:
            self._speculation.forget(name)

    def _forget(self, request_id: str) -> None:
        for kept in (self._thinking, self._deadlines, self._arrivals):
            kept.pop(request_id, None)

    def _note(self, event: Event) -> None:
        """Events keep their order: a request's tokens come before its end."""
        self._gather()
        self._events.append(event)

    def _gather(self) -> None:
        if self._pairs:
            told = tuple(self._told) if any(self._told) else ()
            self._events.append(Tokens(tuple(self._pairs), told))
            self._pairs, self._told = [], []

    def _flush(self, may_hold: bool = False) -> None:
        """Hands over what happened. may_hold: the next tokens come soon, and those that are there may wait for them."""
        now = self._clock()
        if may_hold and not self._events and now - self._told_at < HELD_SECONDS:
            return
        self._gather()
        if self._events:
            self._told_at = now
            events, self._events = tuple(self._events), []
            self._emit(events)


def _view(held: Holding, sequence: Sequence | None) -> SlotView:
    if sequence is None:
        return SlotView(held.seq, "idle", len(held.tokens))
    state: SlotState = "waiting" if sequence.after else "writing" if sequence.n_generated else "reading"
    return SlotView(held.seq, state, len(held.tokens), sequence.request.id, len(sequence.request.tokens), sequence.n_generated)
