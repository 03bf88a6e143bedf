"""Drafts by the model's own MTP block, in a second context on the same model.

Row p of that context pairs token p of the text with the target's hidden row of token p - 1 (zeros at 0), and predicts token p + 1. Its
cache is plain attention, so it can be cut anywhere. Further drafts are chained through the block's own hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.batch import Batch, decode, drop, last_position, logits
from a3b_gguf.llama.hidden import hidden_rows, keep_hidden
from a3b_gguf.llama.load import Context
from a3b_gguf.llama.sequences import WHOLE, copy, cut, load_state, save_state, state_size
from a3b_server.calls import Call, Limits, Rows
from a3b_server.scheduler import Sequence

MOST_WAITING = 512  # rows of a slot that does not guess for now, kept until it does or they take too much memory

Row = tuple[int, int, NDArray[np.float32]]  # token, position, the target's hidden row of the position before


@dataclass(slots=True)
class Followed:
    """What the block knows of a slot. n_rows: rows in its cache; waiting: those that come after them; last: hidden row of the last of
    the n_seen tokens that the target evaluated. lost: rows are missing, so it cannot guess until the slot starts anew.
    """

    n_seen: int = 0
    n_rows: int = 0
    waiting: list[Row] = field(default_factory=list)
    last: NDArray[np.float32] | None = None
    lost: bool = False


class MtpDrafter:
    """Owns what the MTP context holds. `own` is that context; whoever opened the contexts closes them."""

    def __init__(self, target: Context, own: Context, limits: Limits, n_draft: int) -> None:
        self.n_draft = n_draft
        self._target, self._own, self._limits = target, own, limits
        self._n_embd = target.model.n_embd
        self._most = limits.n_batch
        self._batch = Batch(self._most, self._n_embd)
        self._slots = [Followed() for _ in range(limits.n_seq_max)]
        self._uncopied: set[int] = set()  # slots of copies that the block's next call makes; see `sequences.copy`
        keep_hidden(target)
        keep_hidden(own)

    def follow(self, call: Call) -> None:
        hidden = hidden_rows(self._target, sum(len(rows.tokens) for rows in call.rows), self._n_embd)
        at = 0
        for rows in call.rows:
            self._add(rows, hidden[at : at + len(rows.tokens)])
            at += len(rows.tokens)
        for rows in call.rows:
            if len(self._slots[rows.seq].waiting) >= MOST_WAITING:
                self._flush(rows.seq)

    def _add(self, rows: Rows, hidden: NDArray[np.float32]) -> None:
        slot = self._slots[rows.seq]
        before = slot.last if rows.pos else np.zeros(self._n_embd, np.float32)
        if before is None:
            slot.lost = True
        if slot.lost or before is None:
            return
        for pos, (token, row) in enumerate(zip(rows.tokens, hidden, strict=True), rows.pos):
            if pos >= slot.n_rows + len(slot.waiting):
                slot.waiting.append((token, pos, before))
            before = row
        slot.last, slot.n_seen = before, rows.pos + len(rows.tokens)

    def draft(self, sequences: Several[Sequence]) -> dict[int, list[int]]:
        for sequence in sequences:  # one call for all must have room for every slot: its newest token and what a step accepts
            if len(self._slots[sequence.seq].waiting) > self.n_draft:
                self._flush(sequence.seq)
        able = [s for s in sequences if not self._slots[s.seq].lost and self._slots[s.seq].last is not None]
        steps = [(s.seq, self._newest(s)) for s in able]
        drafts: dict[int, list[int]] = {seq: [] for seq, _ in steps}
        for _ in range(self.n_draft if steps else 0):
            guessed = self._step(steps)
            if guessed is None:
                for seq, _ in steps:
                    self._lose(seq)
                return {}
            for (seq, _), (token, _, _) in zip(steps, guessed, strict=True):
                drafts[seq].append(token)
            steps = [(seq, [row]) for (seq, _), row in zip(steps, guessed, strict=True)]
        for sequence in able:  # the row of the newest token is true, those of guessed ones are not
            self._slots[sequence.seq].n_rows = sequence.evaluated + 1
            cut(self._own, sequence.seq, sequence.evaluated + 1)
        return drafts

    def _newest(self, sequence: Sequence) -> list[Row]:
        """Rows that the block has not seen yet, up to that of the newest token, which predicts the one after it."""
        slot = self._slots[sequence.seq]
        self.keep(sequence.seq, sequence.evaluated)  # an earlier guess may never have been verified
        rows, slot.waiting = slot.waiting, []
        assert slot.last is not None
        return [*rows, (sequence.tokens[-1], sequence.evaluated, slot.last)]

    def _step(self, steps: Several[tuple[int, list[Row]]]) -> list[Row] | None:
        """The row that follows the last one of each slot: its likeliest next token, and the block's own hidden row. None: it failed."""
        self._batch.clear()
        last = [self._add_rows(seq, rows, 1) for seq, rows in steps]
        if decode(self._own, self._batch):
            return None
        self._uncopied.clear()
        found = hidden_rows(self._own, len(self._batch), self._n_embd)
        likeliest = [int(logits(self._own, row, self._limits.n_vocab).argmax()) for row in last]
        return [(token, rows[-1][1] + 1, found[row]) for token, row, (_, rows) in zip(likeliest, last, steps, strict=True)]

    def _add_rows(self, seq: int, rows: Several[Row], outputs: int) -> int:
        last = self._batch.add(seq, rows[0][1], [token for token, _, _ in rows], outputs)
        self._batch.hidden[last + 1 - len(rows) : last + 1] = [hidden for _, _, hidden in rows]
        return last

    def _flush(self, seq: int) -> None:
        """Brings the rows that wait into the block's cache."""
        slot = self._slots[seq]
        while slot.waiting and not slot.lost:
            part, slot.waiting = slot.waiting[: self._most], slot.waiting[self._most :]
            self._batch.clear()
            self._add_rows(seq, part, 0)
            if decode(self._own, self._batch):
                self._lose(seq)
            else:
                self._uncopied.clear()
                slot.n_rows = part[-1][1] + 1

    def _lose(self, seq: int) -> None:
        drop(self._own, seq)
        self._slots[seq] = Followed(lost=True)

    def keep(self, seq: int, n_tokens: int) -> None:
        slot = self._slots[seq]
        if n_tokens < slot.n_seen:
            slot.last = next((before for _, pos, before in slot.waiting if pos == n_tokens), None)
            slot.n_seen = n_tokens
        slot.waiting = [row for row in slot.waiting if row[1] < n_tokens]
        if slot.n_rows > n_tokens:
            cut(self._own, seq, n_tokens)
            slot.n_rows = n_tokens

    def begin(self, seq: int, source: int | None, n_tokens: int, hidden: NDArray[np.float32] | None) -> None:
        if source is None:
            drop(self._own, seq)
            self._slots[seq] = Followed()
            return
        if source != seq:
            self._flush(source)
            drop(self._own, seq)
            copy(self._own, source, seq)
            self._uncopied |= {source, seq}
            self._slots[seq] = replace(self._slots[source], waiting=[])
        self.keep(seq, n_tokens)
        if hidden is not None:
            self._slots[seq].last = hidden

    def hidden(self, seq: int) -> NDArray[np.float32] | None:
        return self._slots[seq].last

    def stored_bytes(self, seq: int) -> int:
        self._flush(seq)
        slot = self._slots[seq]
        if slot.lost or slot.last is None or slot.n_rows != slot.n_seen or seq in self._uncopied:
            return 0
        return slot.last.nbytes + state_size(self._own, seq, WHOLE)

    def store(self, seq: int, memory: NDArray[np.uint8]) -> None:
        last = self._slots[seq].last
        assert last is not None
        memory[: last.nbytes] = last.view(np.uint8)
        if save_state(self._own, seq, memory[last.nbytes :], WHOLE) != len(memory) - last.nbytes:
            memory[:] = 0  # which cannot be brought back

    def bring_back(self, seq: int, n_tokens: int, stored: NDArray[np.uint8]) -> None:
        width = 4 * self._n_embd
        if len(stored) <= width or seq in self._uncopied:
            return
        if load_state(self._own, seq, stored[width:], WHOLE) and last_position(self._own, seq) == n_tokens - 1:
            self._slots[seq] = Followed(n_tokens, n_tokens, last=stored[:width].copy().view(np.float32))
        else:
            self._lose(seq)

    def close(self) -> None:
        for seq in range(len(self._slots)):
            drop(self._own, seq)
