"""Encodes chunks in threads ahead of the writer, in order, and over the borders of tensors: no core waits for the last chunk of one.

Each thread reads its rows, decodes, checks and encodes them; whoever iterates writes meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from a3b_gguf.tensors import n_rows

CHUNK_WEIGHTS = 1 << 20
Chunk = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Work:
    """A tensor to encode. encode: rows start..stop to bytes; shape: of the tensor."""

    encode: Callable[[int, int], Chunk]
    shape: tuple[int, ...]


def spans(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of whole rows, each of about CHUNK_WEIGHTS weights."""
    step = max(1, CHUNK_WEIGHTS // shape[-1])
    return [(start, min(start + step, n_rows(shape))) for start in range(0, n_rows(shape), step)]


class Pipeline:
    """Owns the threads and the chunks that they are ahead, at most twice as many as threads.

    Tensors are asked for in their order; another order costs what was encoded ahead. With one thread whoever asks does the work.
    """

    def __init__(self, works: Sequence[Work], threads: int) -> None:
        self._works, self._threads = works, threads
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[Chunk]] = deque()
        self._ahead: Iterator[tuple[Work, int, int]] = iter(())
        self._expected = -1

    def chunks(self, index: int) -> Iterator[Chunk]:
        """The bytes of tensor `index` in order. Raises what its `encode` raises."""
        work = self._works[index]
        if self._threads == 1:
            for start, stop in spans(work.shape):
                yield work.encode(start, stop)
            return
        if index != self._expected:
            self._start(index)
        self._expected = -1
        try:
            for _ in spans(work.shape):
                yield self._next()
            if index + 1 < len(self._works):
                self._expected = index + 1
        finally:  # a failure, a writer that stopped, or the end: do not compute what nobody will read
            if self._expected < 0:
                self.stop()

    def stop(self) -> None:
        """Forgets what was encoded ahead and ends the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._pending.clear()

    def _start(self, index: int) -> None:
        self.stop()
        self._ahead = ((work, *span) for work in self._works[index:] for span in spans(work.shape))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="quantize")

    def _next(self) -> Chunk:
        """The next chunk, with as many as may be on their way behind it."""
        while self._pool is not None and len(self._pending) < 2 * self._threads:
            task = next(self._ahead, None)
            if task is None:
                break
            work, start, stop = task
            self._pending.append(self._pool.submit(work.encode, start, stop))
        return self._pending.popleft().result()
