"""One call of llama_decode as a value, and the check that keeps it from ending the process.

llama.cpp aborts on more rows than n_batch and on more output rows than n_outputs_max, and a hybrid accepts a gap in the
positions without a word and answers nonsense. So every call is checked here before C sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class BadCall(Exception):
    """A call that must not reach llama.cpp: a bug in a3b, never the fault of a request."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens of one sequence from position `pos` on; the last `outputs` of them give logits."""

    seq: int
    pos: int
    tokens: Sequence[int]
    outputs: int


@dataclass(frozen=True, slots=True)
class Call:
    """Rows of different sequences, in ascending order of sequence."""

    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the context was opened with. n_ctx: tokens of all sequences together; n_ctx_seq: of one."""

    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    n_batch: int
    n_outputs_max: int
    n_vocab: int


def check_call(call: Call, limits: Limits, next_pos: Callable[[int], int]) -> None:
    """Raises BadCall that names the rule. next_pos: the position after the last one that the cache holds of a sequence."""
    n_rows, n_outputs = sum(len(rows.tokens) for rows in call.rows), sum(rows.outputs for rows in call.rows)
    if not 1 <= n_rows <= limits.n_batch:
        raise BadCall(f"{n_rows} rows, expected 1 to n_batch, which is {limits.n_batch}")
    if n_outputs > limits.n_outputs_max:
        raise BadCall(f"{n_outputs} output rows, n_outputs_max is {limits.n_outputs_max}")
    order = [rows.seq for rows in call.rows]
    if order != sorted(set(order)):
        raise BadCall(f"sequences {order}, expected each once and in order")
    for rows in call.rows:
        _check_rows(rows, limits, next_pos(rows.seq) if 0 <= rows.seq < limits.n_seq_max else None)


def _check_rows(rows: Rows, limits: Limits, expected: int | None) -> None:
    if expected is None:
        raise BadCall(f"sequence {rows.seq}, expected 0 to {limits.n_seq_max - 1}")
    if not rows.tokens or not 0 <= rows.outputs <= len(rows.tokens):
        raise BadCall(f"sequence {rows.seq}: {len(rows.tokens)} rows with {rows.outputs} outputs")
    if rows.pos != expected:
        raise BadCall(f"sequence {rows.seq}: position {rows.pos}, the cache goes on at {expected}")
    if rows.pos + len(rows.tokens) > limits.n_ctx_seq:
        raise BadCall(f"sequence {rows.seq}: {rows.pos + len(rows.tokens)} tokens, a sequence holds {limits.n_ctx_seq}")
    if not (min(rows.tokens) >= 0 and max(rows.tokens) < limits.n_vocab):
        raise BadCall(f"sequence {rows.seq}: tokens {min(rows.tokens)} to {max(rows.tokens)}, the vocabulary has {limits.n_vocab}")
