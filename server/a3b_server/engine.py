"""The engine: every sequence of one context, decoded on one thread. What to run is the scheduler's choice; this runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from a3b_gguf.llama.batch import Batch, decode, drop, last_position, logits
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.sampler import Sampler
from a3b_gguf.llama.vocab import Vocab
from a3b_server.calls import BadCall, Call, Limits, check_call
from a3b_server.messages import Event, Failed, Finished, FinishReason, Submit, Tokens
from a3b_server.scheduler import Scheduler, Sequence

# Results of llama_decode. Everything else (2: aborted, -2 and -3: failed) leaves the sequences of the call in an unknown state.
DONE, NO_ROOM, REFUSED = 0, 1, -1
MOST_RESTARTS = 1

Emit = Callable[[tuple[Event, ...]], None]


class Engine:
    """Owns the sequences of `context`; whoever opened the context closes it. emit is called between two calls of llama_decode.

    Use it from one thread. Requests are submitted and cancelled between steps only, so no call is ever interrupted.
    """

    def __init__(self, context: Context, vocab: Vocab, limits: Limits, chunk: int, emit: Emit) -> None:
        self.scheduler = Scheduler(limits, chunk)
        self._context, self._vocab, self._limits, self._emit = context, vocab, limits, emit
        self._batch = Batch(limits.n_batch)
        self._samplers: dict[int, Sampler] = {}  # by slot; greedy requests have none
        self._events: list[Event] = []

    def submit(self, request: Submit) -> None:
        """Queues a request. One that can never run fails at once."""
        try:
            self.scheduler.submit(request)
        except ValueError as error:
            self._events.append(Failed(request.id, str(error)))
            self._flush()

    def cancel(self, request_id: str) -> None:
        """Ends a request, waiting or running; nothing happens when it is over already."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")
        elif (request := self.scheduler.withdraw(request_id)) is not None:
            self._events.append(Finished(request.id, "cancelled", len(request.tokens), 0))
        self._flush()

    def step(self) -> None:
        """Admits, then one token for everyone who generates, then one chunk of one prompt."""
        for sequence in self.scheduler.admit():
            wanted = sequence.request.sampling
            if not wanted.is_greedy:
                self._samplers[sequence.seq] = Sampler(wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p, wanted.seed)
        for next_call in (self.scheduler.decode_call, self.scheduler.prefill_call):
            call = next_call()
            if call is not None:
                self._run(call)
                self._flush()

    def close(self) -> None:
        """Cancels everything."""
        for request in tuple(self.scheduler.waiting):
            self.cancel(request.id)
        for sequence in tuple(self.scheduler.running.values()):
            self.cancel(sequence.request.id)

    def _run(self, call: Call) -> None:
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
        self._draw([(self.scheduler.running[rows.seq], row) for rows, row in zip(call.rows, last_rows, strict=True) if rows.outputs])

    def _draw(self, outputs: list[tuple[Sequence, int]]) -> None:
        """Chooses the next token of each sequence from its row of logits, and ends those that are over."""
        pairs: list[tuple[str, int]] = []
        over: list[tuple[Sequence, FinishReason]] = []
        for sequence, row in outputs:
            token = self._pick(sequence, row)
            if token is None:
                self._end(sequence)
                self._events.append(Failed(sequence.request.id, "the model's logits are not numbers; its file may be damaged"))
                continue
            sequence.tokens.append(token)
            if self._vocab.is_eog(token):
                over.append((sequence, "stop"))
                continue
            pairs.append((sequence.request.id, token))
            if sequence.n_generated >= sequence.request.max_tokens:
                over.append((sequence, "length"))
        if pairs:
            self._events.append(Tokens(tuple(pairs)))
        for sequence, reason in over:
            self._finish(sequence, reason)

    def _pick(self, sequence: Sequence, row: int) -> int | None:
        """The next token of a sequence; None when its logit is no number."""
        row_logits = logits(self._context, row, self._limits.n_vocab)
        sampler = self._samplers.get(sequence.seq)
        token = int(row_logits.argmax()) if sampler is None else sampler.sample(self._context, row)
        return token if math.isfinite(row_logits[token]) else None

    def _recover(self, result: int, call: Call) -> None:
        """After a call that failed. Source of the results: llama_decode in llama.h, and what memory holds after each was measured."""
        sequences = [self.scheduler.running[rows.seq] for rows in call.rows]
        if result == NO_ROOM:
            self._make_room(call, sequences)
        elif result == REFUSED:
            self._fail(call, "internal error: llama.cpp refused a batch")
        else:
            for sequence in sequences:
                drop(self._context, sequence.seq)
                if sequence.n_restarts < MOST_RESTARTS:
                    self.scheduler.restart(sequence)
                else:
                    self._end(sequence)
                    self._events.append(Failed(sequence.request.id, f"llama.cpp failed twice to compute (result {result})"))

    def _make_room(self, call: Call, sequences: list[Sequence]) -> None:
        """The cache is full although reservations fit: halve a chunk, else end the youngest request of the call."""
        rows = call.rows[0]
        if len(call.rows) == 1 and len(rows.tokens) > 1:
            self._run(Call((replace(rows, tokens=rows.tokens[: len(rows.tokens) // 2], outputs=0),)))
            return
        youngest = [s for s in self.scheduler.running.values() if s in sequences][-1]
        self._finish(youngest, "length")

    def _fail(self, call: Call, message: str) -> None:
        for rows in call.rows:
            sequence = self.scheduler.running[rows.seq]
            self._end(sequence)
            self._events.append(Failed(sequence.request.id, message))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._end(sequence)
        self._events.append(Finished(sequence.request.id, reason, len(sequence.request.tokens), sequence.n_generated))

    def _end(self, sequence: Sequence) -> None:
        """Frees everything that a sequence holds."""
        drop(self._context, sequence.seq)
        sampler = self._samplers.pop(sequence.seq, None)
        if sampler is not None:
            sampler.close()
        self.scheduler.release(sequence)

    def _flush(self) -> None:
        if self._events:
            events, self._events = tuple(self._events), []
            self._emit(events)
