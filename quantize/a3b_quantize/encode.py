"""Turns assignments into jobs: rows are read, checked, encoded in threads, and come out as bytes in order.

Memory is bounded: a chunk holds about a million weights, and at most two chunks a thread are alive at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.ggml import quantize_chunk, validate
from a3b_gguf.tensors import GGMLType, Model, TensorJob, TensorSource, n_rows
from a3b_quantize.assign import Assignment
from a3b_quantize.kernels import KERNELS as FAST_KERNELS

CHUNK_WEIGHTS = 1 << 20
# Rows [n, columns] to blocks [n, bytes of a row]; releases the GIL while it works.
Kernel = Callable[[GGMLType, NDArray[np.float32]], NDArray[np.uint8]]


def fast_chunk(kind: GGMLType, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Our kernel of a type, and ggml's where we have none."""
    ours = FAST_KERNELS.get(kind.name)
    return ours(rows) if ours else quantize_chunk(kind, rows)


KERNELS: dict[str, Kernel] = {"fast": fast_chunk, "ggml": quantize_chunk}


def jobs(model: Model, assignments: Sequence[Assignment], threads: int | None = None, kernel: str = "ggml") -> list[TensorJob]:
    """One job a tensor, in the model's order. threads: all cores when None; the bytes do not depend on it.

    A tensor that keeps its type is copied as it is stored. Iterating a job raises BadInput for a weight that is not finite or that
    the type cannot hold, with tensor, expert and row.
    """
    n_threads = threads or usable_cores()
    return [_job(tensor, each, n_threads, KERNELS[kernel]) for tensor, each in zip(model.tensors, assignments, strict=True)]


def _job(tensor: TensorSource, assignment: Assignment, threads: int, kernel: Kernel) -> TensorJob:
    kind = assignment.type

    def encode(start: int, stop: int) -> bytes | memoryview:
        rows = tensor.rows(start, stop)
        check_finite(tensor, start, rows)
        if kind == tensor.type:
            return tensor.raw(start, stop)
        data = kernel(kind, rows)
        if not validate(kind, data):
            bad = next(i for i in range(len(data)) if not validate(kind, data[i : i + 1]))
            largest = np.abs(rows[bad]).max()
            raise BadInput(
                f"{tensor.name}, {place(tensor.shape, start + bad)}: {kind.name} cannot hold its values, the largest is {largest:g}",
                "choose a type with a wider range, such as bf16",
            )
        return data.data.cast("B")

    return TensorJob(tensor.name, tensor.shape, kind, lambda: in_order(encode, spans(tensor.shape), threads))


def usable_cores() -> int:
    """Cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spans(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of whole rows, each of about CHUNK_WEIGHTS weights."""
    step = max(1, CHUNK_WEIGHTS // shape[-1])
    return [(start, min(start + step, n_rows(shape))) for start in range(0, n_rows(shape), step)]


def in_order(
    encode: Callable[[int, int], bytes | memoryview], ranges: Sequence[tuple[int, int]], threads: int
) -> Iterator[bytes | memoryview]:
    """The results of `encode` over `ranges`, in order, computed by `threads` threads at most twice that many ahead."""
    if threads == 1 or len(ranges) == 1:
        for span in ranges:
            yield encode(*span)
        return
    pending: deque[Future[bytes | memoryview]] = deque()
    with ThreadPoolExecutor(min(threads, len(ranges)), thread_name_prefix="quantize") as pool:
        try:
            for span in ranges:
                pending.append(pool.submit(encode, *span))
                if len(pending) >= 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # a failure, or a writer that stopped: do not compute what nobody will read
            for future in pending:
                future.cancel()


def check_finite(tensor: TensorSource, first_row: int, rows: NDArray[np.float32]) -> None:
    """Raises BadInput when a weight is NaN or infinite: a kernel would turn its whole block into zeros, and say nothing."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(rows, axis=None)  # one pass without a temporary; not finite when a weight is not, or when it overflows
    if np.isfinite(total) or np.isfinite(rows).all():
        return
    row, column = np.argwhere(~np.isfinite(rows))[0]
    where = place(tensor.shape, first_row + int(row))
    raise BadInput(
        f"{tensor.name}, {where}, column {column}: the weight is {rows[row, column]}", "the source is damaged; download it again"
    )


def place(shape: tuple[int, ...], row: int) -> str:
    """A row's number as people count it: by expert where the tensor has experts."""
    if len(shape) < 3:
        return f"row {row}"
    rows_of_expert = shape[-2]
    return f"expert {row // rows_of_expert} of {prod(shape[:-2])}, row {row % rows_of_expert}"
