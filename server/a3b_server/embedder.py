"""The engine of a model that pools: texts in, vectors out. The counterpart of engine.Engine, with the same way of being driven."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.pooling import Pooler
from a3b_server.messages import Counts, Embed, Embedded, Event, Failed, Snapshot


@dataclass(slots=True, eq=False)
class _Job:
    """A request, and the vectors of its first texts."""

    request: Embed
    vectors: list[bytes] = field(default_factory=list)
    n_running: int = 0


class Embedder:
    """Owns the requests that wait. emit is called between two calls of llama_decode. Use it from one thread."""

    def __init__(self, pooler: Pooler, emit: Callable[[tuple[Event, ...]], None]) -> None:
        self._pooler, self._emit = pooler, emit
        self._jobs: deque[_Job] = deque()
        self._n_requests = self._n_read = 0

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def submit(self, request: Embed) -> None:
        """Queues a request. One with a text that is empty or too long fails at once."""
        wrong = next((len(text) for text in request.texts if not 0 < len(text) <= self._pooler.most), None)
        if wrong is not None or not request.texts:
            self._emit((Failed(request.id, f"texts have 1 to {self._pooler.most:,} tokens, one has {wrong}"),))
        else:
            self._jobs.append(_Job(request))

    def cancel(self, request_id: str) -> None:
        """Ends a request; nothing happens when it is over already."""
        for job in [job for job in self._jobs if job.request.id == request_id]:
            self._jobs.remove(job)
            self._emit((Failed(request_id, "it was cancelled"),))

    def step(self) -> None:
        """One call: texts of every request in turn, as many as fit, so that one text does not wait for the thousands of another request."""
        chosen = self._choose()
        if not chosen:
            return
        texts = [job.request.texts[index] for job, index in chosen]
        vectors = self._pooler.pool(texts)
        failed = []
        if vectors is None:
            failed = [job for job in self._jobs if job.n_running]
        else:
            self._n_read += sum(map(len, texts))
            self._take(chosen, vectors)
        events: list[Event] = [Failed(job.request.id, "llama.cpp failed to compute") for job in failed]
        events += [
            Embedded(job.request.id, tuple(job.vectors)) for job in self._jobs if len(job.vectors) == len(job.request.texts)
        ]
        over = {event.id for event in events if isinstance(event, Failed | Embedded)}
        self._n_requests += len(over)
        self._jobs = deque(job for job in self._jobs if job.request.id not in over)
        self._jobs.rotate(-1)
        for job in self._jobs:
            job.n_running = 0
        if events:
            self._emit(tuple(events))

    def _choose(self) -> list[tuple[_Job, int]]:
        """Texts of the next call: one of every request, then another of every request, as long as they fit together."""
        chosen: list[tuple[_Job, int]] = []
        lengths: list[int] = []
        while True:
            grown = False
            for job in self._jobs:
                index = len(job.vectors) + job.n_running
                if index == len(job.request.texts):
                    continue
                lengths.append(len(job.request.texts[index]))
                if not self._pooler.fit(lengths):
                    return chosen
                chosen.append((job, index))
                job.n_running += 1
                grown = True
            if not grown:
                return chosen

    def _take(self, chosen: list[tuple[_Job, int]], vectors: NDArray[np.float32]) -> None:
        for (job, _), vector in zip(chosen, vectors.astype("<f4"), strict=True):
            job.vectors.append(vector.tobytes())

    def look(self) -> Snapshot:
        """There are no slots: nothing of a text is kept."""
        return Snapshot((), len(self._jobs), (0, 0), Counts(n_requests=self._n_requests, n_read=self._n_read))

    def close(self) -> None:
        """Cancels everything."""
        for job in tuple(self._jobs):
            self.cancel(job.request.id)
