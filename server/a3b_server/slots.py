"""What the cache holds: of requests that run, and of those that are over, from which the next ones start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from a3b_gguf.llama.batch import Batch, decode, drop, last_position
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.sequences import copy, cut, load_state, save_state, state_size
from a3b_server.calls import Call, Limits
from a3b_server.checkpoints import Checkpoint, CheckpointPool
from a3b_server.drafts import Drafter
from a3b_server.prefixes import Holding, Reuse, Start, find_start
from a3b_server.saved_texts import SavedTexts
from a3b_server.scheduler import Sequence
from a3b_server.stops import aligned_stops, stops
from a3b_server.text_store import Entry

Running = Mapping[int, Sequence]


class Slots:
    """Owns the sequences in the cache and the checkpoints of hybrids. A slot keeps its text until another request needs its place."""

    def __init__(self, context: Context, limits: Limits, aligned: int, checkpoint_bytes: int, drafter: Drafter | None) -> None:
        """aligned: reuse only whole chunks of so many tokens; 0: any. checkpoint_bytes: budget of the pool."""
        self._context, self._aligned, self._drafter = context, aligned, drafter
        self._is_recurrent = context.model.is_hybrid
        n_bytes = _state_bytes(context) if self._is_recurrent else 0
        self.checkpoints = CheckpointPool(n_bytes, checkpoint_bytes)
        self._spare = np.zeros(n_bytes, np.uint8)
        shares_rows = limits.n_ctx_seq == limits.n_ctx
        self._reuse = Reuse(self._is_recurrent, self.checkpoints, aligned, 0 if shares_rows else limits.n_ctx_seq)
        self._uncopied: list[tuple[int, int]] = []  # slots and those that they are copied to, at the start of the next call
        self._held = [Holding(seq) for seq in range(limits.n_seq_max)]
        self._rolled_back: set[int] = set()  # slots whose newest state is the one before drafts that were wrong
        self._clock = 0
        self.saved: SavedTexts | None = None  # texts that no slot holds any more
        self.tally: Counter[str] = Counter()  # fields of messages.Counts

    def held(self, running: Running) -> list[Holding]:
        """What every slot holds now."""
        return [self._of(seq, running.get(seq)) for seq in range(len(self._held))]

    def _of(self, seq: int, sequence: Sequence | None) -> Holding:
        held = self._held[seq]
        if sequence is None:
            return held
        if sequence.after is not None:  # its slot still holds what an earlier request left
            return Holding(seq, held.tokens, False, held.used, held.n_exact, sequence.tokens)
        return Holding(seq, sequence.tokens[: sequence.evaluated], False, held.used, sequence.n_exact, sequence.tokens)

    def find(self, prompt: list[int], running: Running) -> Start:
        """Where a new request shall start; a slot must be idle."""
        start = find_start(prompt, self.held(running), self._reuse)
        can_load = all(start.seq not in pair for pair in self._uncopied)  # what is loaded now is overwritten by, or is, what is copied then
        if self.saved is not None and start.after is None and can_load and self._bring_back(self.saved, prompt, start, running):
            start = find_start(prompt, self.held(running), self._reuse)
        return start

    def _bring_back(self, saved: SavedTexts, prompt: list[int], start: Start, running: Running) -> bool:
        """Loads the saved text that helps the prompt more than `start` into the slot that it would start in."""
        entry = saved.better(prompt, start.n_tokens, self._reuse)
        if entry is None:
            return False
        self._save(start.seq, entry)
        self.drop(start.seq)
        found = saved.bring_back(entry, start.seq, lambda: self.evict(running, entry))
        if found is not None:
            self._held[start.seq] = found
            self.tally["n_loaded"] += 1
            self._use(start.seq)
        return found is not None

    def _save(self, seq: int, spared: Entry | None = None) -> None:
        """The text of an idle slot is about to be lost."""
        if self.saved is not None and self._is_copied(seq):
            self.tally["n_saved"] += self.saved.keep(self._held[seq], spared)

    def _is_copied(self, seq: int) -> bool:
        """Whether a slot's rows are there already, and not still to be copied from another one."""
        return all(seq != target for _, target in self._uncopied)

    def must_wait(self, sequence: Sequence, running: Running) -> bool:
        """Whether another sequence is still on its way to the text that this one starts from."""
        assert sequence.after is not None
        source, count = sequence.after
        return running.get(source.seq) is source and source.evaluated < count

    def resume(self, sequence: Sequence, running: Running) -> None:
        """Starts a sequence that waited for another one."""
        sequence.after = None
        others = [h for h in self.held(running) if h.seq != sequence.seq]
        mine = self._held[sequence.seq]
        self.begin(sequence, find_start(sequence.tokens, [*others, mine], self._reuse, into=sequence.seq, may_wait=False), running)

    def begin(self, sequence: Sequence, start: Start, running: Running) -> None:
        """Fills the slot of a sequence as `start` says, and sets where its reading pauses."""
        if start.after is not None:
            source, count = running[start.after[0]], start.after[1]
            sequence.after = (source, count)
            if self._is_recurrent and count not in source.stops:
                source.stops = sorted((*source.stops, count))
            return
        n_tokens = self._fill(start)
        self.tally.update(n_cached=n_tokens, n_read=len(sequence.request.tokens) - n_tokens)
        sequence.evaluated = sequence.n_cached = n_tokens
        sequence.n_exact = n_tokens if self._aligned else 0
        prompt = sequence.request
        wanted = {count for count in sequence.stops if count > n_tokens}  # those that others wait for
        if self._aligned:
            wanted.update(aligned_stops(n_tokens, len(prompt.tokens), self._aligned))
        elif self._is_recurrent and self.checkpoints.n_most:
            wanted.update(stops(n_tokens, len(prompt.tokens), prompt.marks))
        sequence.stops = sorted(wanted)
        self._use(sequence.seq)

    def _use(self, seq: int) -> None:
        self._clock += 1
        self._held[seq].used = self._clock

    def _fill(self, start: Start) -> int:
        """Makes the slot hold the tokens that `start` names; returns how many it holds, 0 after anything unexpected."""
        seq, source, n_tokens, checkpoint = start.seq, start.source, start.n_tokens, start.checkpoint
        if source != seq or 2 * n_tokens < len(self._held[seq].tokens):
            self._save(seq)
        if source is None or not self._take_over(seq, source, n_tokens, checkpoint) or last_position(self._context, seq) != n_tokens - 1:
            self.drop(seq)
            return 0
        if self._drafter is not None:
            self._drafter.begin(seq, source, n_tokens, checkpoint.hidden if checkpoint else None)
        if checkpoint is not None:
            self.checkpoints.touch(checkpoint)
        if source != seq:
            self._rolled_back.discard(seq)
            self._use(source)
        self.tally.update(n_continued=source == seq, n_copied=source != seq, n_restored=checkpoint is not None)
        return n_tokens

    def _take_over(self, seq: int, source: int, n_tokens: int, checkpoint: Checkpoint | None) -> bool:
        state = checkpoint.state if checkpoint else None
        if source != seq:
            if state is None and source in self._rolled_back:  # a plain copy would have the state before it was rolled back
                save_state(self._context, source, self._spare)
                state = self._spare
            drop(self._context, seq)
            copy(self._context, source, seq)
            if self._reuse.n_copied:
                self._uncopied.append((source, seq))
        if state is not None and not load_state(self._context, seq, state):
            return False
        return (last_position(self._context, seq) == n_tokens - 1 and state is None) or cut(self._context, seq, n_tokens)

    def evaluated(self, call: Call, sequences: Iterable[Sequence]) -> None:
        """A call was done. Takes checkpoints where one is due. Nothing may be decoded between the call and this."""
        self._uncopied.clear()
        if self._drafter is not None:
            self._drafter.follow(call)
        for rows, sequence in zip(call.rows, sequences, strict=True):
            self._rolled_back.discard(rows.seq)
            if self._aligned and rows.pos == sequence.n_exact and len(rows.tokens) % self._aligned == 0:
                sequence.n_exact += len(rows.tokens)
            if self._is_recurrent and sequence.evaluated in sequence.stops:
                self._keep_state(sequence)

    def _keep_state(self, sequence: Sequence) -> None:
        found = self.checkpoints.take(sequence.tokens[: sequence.evaluated])
        if found is None:
            return
        if save_state(self._context, sequence.seq, found.state) != len(found.state):
            self.checkpoints.discard(found)
        elif self._drafter is not None:
            found.hidden = self._drafter.hidden(sequence.seq)

    def roll_back(self, sequence: Sequence, n_tokens: int) -> bool:
        """Takes back drafts that were wrong, directly after the call that verified them. False: the slot must be dropped."""
        if not cut(self._context, sequence.seq, n_tokens):
            return False
        sequence.evaluated = n_tokens
        if self._is_recurrent:
            self._rolled_back.add(sequence.seq)
        if self._drafter is not None:
            self._drafter.keep(sequence.seq, n_tokens)
        return True

    def finish(self, sequence: Sequence) -> None:
        """The request is over; its text stays for those to come."""
        if sequence.after is None:
            held = self._held[sequence.seq]
            held.tokens, held.n_exact = sequence.tokens[: sequence.evaluated], sequence.n_exact
        self._use(sequence.seq)

    def drop(self, seq: int) -> None:
        """Forgets all that a slot holds."""
        drop(self._context, seq)
        self._held[seq] = Holding(seq)
        self._rolled_back.discard(seq)
        if self._drafter is not None:
            self._drafter.begin(seq, None, 0, None)

    def evict(self, running: Running, spared: Entry | None = None) -> bool:
        """Drops the idle text that was not needed for the longest time; False when there is none. spared: a saved text to be kept."""
        idle = [held for held in self._held if held.seq not in running and held.tokens]
        if not idle:
            return False
        seq = min(idle, key=lambda held: held.used).seq
        self._save(seq, spared)
        self.drop(seq)
        self.tally["n_evicted"] += 1
        return True

    def clear(self) -> None:
        """Drops everything; texts that can be saved are, those that were used last before others."""
        for held in sorted(self._held, key=lambda h: -h.used):
            if self.saved is not None and self._is_copied(held.seq):
                self.saved.keep_last(held)
            self.drop(held.seq)


def _state_bytes(context: Context) -> int:
    """Bytes of a recurrent state, which a sequence has only once something was decoded."""
    batch = Batch(1)
    batch.add(0, 0, [0], 1)
    n_bytes = state_size(context, 0) if decode(context, batch) == 0 else 0
    drop(context, 0)
    return n_bytes
