"""Progress of quantizing in weights a second: bytes alone do not compare between types."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from a3b_gguf.gguf_write import Progress
from a3b_quantize.assign import Assignment


class WeightRate:
    """A Progress that tells another one the same, with the rate in front of the tensor's name. What an earlier run left is not counted."""

    def __init__(self, progress: Progress, assignments: Sequence[Assignment], clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._sizes = {each.name: (each.n_weights, each.nbytes) for each in assignments}
        self._before = 0.0  # weights of the tensors that are through
        self._name, self._first_byte = "", 0
        self._started: tuple[float, float] | None = None  # when, and with how many weights done

    def __call__(self, done: int, total: int, name: str) -> None:
        if name not in self._sizes:
            self._progress(done, total, name)
            return
        if name != self._name:
            self._before += self._sizes.get(self._name, (0, 0))[0]
            self._name, self._first_byte = name, done
        n_weights, n_bytes = self._sizes[name]
        weights = self._before + n_weights * min(1.0, (done - self._first_byte) / max(n_bytes, 1))
        now = self._clock()
        if self._started is None:
            self._started = now, weights
        seconds = now - self._started[0]
        rate = f"{(weights - self._started[1]) / seconds / 1e6:,.1f} M weights/s, " if seconds > 0 else ""
        self._progress(done, total, rate + name)
