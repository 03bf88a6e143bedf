"""Ends a think block that grew too long, so that there is room left for the answer."""

from __future__ import annotations

from a3b_server.messages import ThinkBudget

CLOSE = b"</think>"


class ThinkClock:
    """Counts the tokens of a think block that is open when it starts, and sees its end."""

    def __init__(self, budget: ThinkBudget) -> None:
        self._budget, self._n, self._tail, self._open = budget, 0, b"", True

    def tick(self, piece: bytes) -> tuple[int, ...]:
        """After a token with these bytes: the tokens that must be written now; mostly none."""
        if not self._open:
            return ()
        self._n += 1
        self._tail = (self._tail + piece)[-64:]
        if CLOSE in self._tail:
            self._open = False
        elif self._n >= self._budget.max_tokens:
            self._open = False
            return self._budget.close
        return ()
