"""How long a chunk of prompts may be, so that those who are already answered do not wait too long for their next token."""

from __future__ import annotations

TARGET_SECONDS = 0.2  # of a chunk beside others
LEAST = 16
EVEN = 64  # CPU flash attention takes another, slower path below so many rows
WEIGHT = 0.3  # of the newest measurement


class Pace:
    """Learns what a row of a prompt costs. most: rows of a chunk when nobody waits; fixed: always that many, for equal cuts."""

    def __init__(self, most: int, fixed: bool = False, target: float = TARGET_SECONDS) -> None:
        self._most, self._fixed, self._target = most, fixed, target
        self._row_seconds: float | None = None

    def rows(self, n_writing: int, n_reading: int) -> int:
        """Rows of the next chunk. n_writing: requests that wait for their next token meanwhile; n_reading: those that wait for their first.

        When more wait for the first than for the next, they all gain from a longer chunk, and few lose.
        """
        if not n_writing or self._fixed:
            return self._most
        patience = max(1.0, n_reading / n_writing)
        if self._row_seconds is None:
            return min(int(EVEN * patience), self._most)
        fitting = int(patience * self._target / self._row_seconds)
        return min(self._most, fitting // EVEN * EVEN or max(LEAST, fitting // LEAST * LEAST))

    def note(self, n_rows: int, seconds: float) -> None:
        """A call with rows of prompts took so long."""
        if n_rows >= LEAST:
            each = seconds / n_rows
            self._row_seconds = each if self._row_seconds is None else (1 - WEIGHT) * self._row_seconds + WEIGHT * each
