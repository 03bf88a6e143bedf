"""How much of the prompts is read before the next token of those who are already being answered."""

from __future__ import annotations

TARGET_SECONDS = 0.26  # between two tokens while one prompt comes in; for every further one as much again
LONGEST_SECONDS = 2.0
SHARE_OF_WAIT = 0.2  # of what somebody waited before his prompt was begun: a pause that all who write can bear then
LEAST = 16
EVEN = 64  # CPU flash attention takes another path below so many rows: on one CPU 16 rows took longer than 64, on another a third
BEARABLE_SECONDS = 1.0  # that so many rows may take, whatever the pause is to be, where fewer take no less
WEIGHT = 0.3  # of the newest measurement


class Pace:
    """Learns what a step and a row of a prompt cost. most: rows of a chunk when nobody waits; fixed: always that many, for equal cuts;
    even: rows below which each may cost more.
    """

    def __init__(self, most: int, fixed: bool = False, target: float = TARGET_SECONDS, even: int = EVEN) -> None:
        self._most, self._fixed, self._target, self._even = most, fixed, target, even
        self._step_seconds = 0.0
        self._row_seconds: dict[bool, float] = {}  # by whether a chunk has at least so many rows

    def rows(self, n_writing: int, n_reading: int, waited: float = 0.0) -> int:
        """Rows to read now. n_writing: requests that wait for their next token meanwhile; n_reading: those that wait for their first;
        waited: the longest time that one of these waited before his prompt was begun.
        """
        if not n_writing or self._fixed:
            return self._most
        if not self._row_seconds:
            return min(self._even, self._most)
        pause = min(LONGEST_SECONDS, max(self._target * max(1, n_reading), SHARE_OF_WAIT * waited))
        left = max(0.0, pause - self._step_seconds)
        even = self._row_seconds.get(True) or self._row_seconds[False]
        few = self._row_seconds.get(False)
        fits, bearable = left >= self._even * even, BEARABLE_SECONDS >= self._even * even
        if fits or (bearable and few is not None and LEAST * few >= self._even * even):
            return max(self._even, int(left / even) // self._even * self._even)
        if self._even <= LEAST or not bearable:
            return min(self._most, max(LEAST, int(left / (few or even)) // LEAST * LEAST))
        if few is None:
            return LEAST  # once, to learn whether fewer rows take less time at all
        return min(self._even - LEAST, max(LEAST, int(left / few) // LEAST * LEAST))

    def note_chunk(self, n_rows: int, seconds: float) -> None:
        """A call with rows of prompts took so long."""
        if n_rows >= LEAST:
            each, even = seconds / n_rows, n_rows >= self._even
            self._row_seconds[even] = each + (1 - WEIGHT) * (self._row_seconds.get(even, each) - each)

    def note_step(self, seconds: float) -> None:
        """A token for everyone who writes took so long."""
        self._step_seconds = seconds + (1 - WEIGHT) * (self._step_seconds - seconds)
