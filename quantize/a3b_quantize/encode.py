"""Turns assignments into jobs: rows are read, checked, encoded in threads (pipeline.py), and come out as bytes in order.

Memory is bounded: a chunk holds about a million weights, and at most two chunks a thread are alive at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.llama.ggml import quantize_chunk, requires_importance, validate
from a3b_gguf.tensors import GGMLType, Model, TensorJob, TensorSource
from a3b_quantize.assign import Assignment
from a3b_quantize.kernels import BLOCK, DEFAULT_EFFORT, EFFORTS, GROUP_SIZES, GROUPED
from a3b_quantize.kernels import KERNELS as FAST_KERNELS
from a3b_quantize.pipeline import Chunk, Pipeline, Work
from a3b_quantize.weighting import Importance, by_matrix, check_importance, revived

MOST_THREADS = 512  # of llama.cpp. Source: GGML_MAX_N_THREADS in ggml.h

# Rows [n, columns], their importance [columns] or None, to blocks [n, bytes of a row]; releases the GIL while it works.
Kernel = Callable[[NDArray[np.float32], NDArray[np.float32] | None], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How tensors are encoded. kernel: of KERNELS; threads: all cores when None, the bytes do not depend on it; effort: of EFFORTS."""

    kernel: str = "fast"
    threads: int | None = None
    effort: int = DEFAULT_EFFORT


def fast_kernel(kind: GGMLType, group_size: int, effort: int) -> Kernel:
    """Our kernel of a type, and ggml's where we have none."""
    return partial(FAST_KERNELS[kind.name], group_size=group_size, effort=effort) if kind.name in FAST_KERNELS else ggml_kernel(kind)


def ggml_kernel(kind: GGMLType, *_: int) -> Kernel:
    """ggml's kernel of a type: the bytes of llama-quantize. Where it needs importance and a matrix has only zeros, all counts alike."""
    needs = requires_importance(kind)

    def encode(rows: NDArray[np.float32], importance: NDArray[np.float32] | None) -> NDArray[np.uint8]:
        if importance is None:
            return quantize_chunk(kind, rows, np.ones(rows.shape[1], np.float32) if needs else None)
        return quantize_chunk(kind, rows, revived(kind, importance))

    return encode


KERNELS: dict[str, Callable[[GGMLType, int, int], Kernel]] = {"fast": fast_kernel, "ggml": ggml_kernel}


def jobs(model: Model, assignments: Sequence[Assignment], encoding: Encoding, importance: Importance | None = None) -> list[TensorJob]:
    """One job a tensor, in the model's order. importance: of the columns of tensors by name; one that is missing counts all alike.

    A tensor that keeps its type is copied as it is stored. Raises BadInput for importance that is damaged or of another model, with
    tensor and expert, and UsageError for a group size that a type or kernel does not have. Iterating a job raises BadInput for a weight
    that is not finite or that the type cannot hold, with tensor, expert and row.
    """
    if encoding.effort not in EFFORTS:
        raise UsageError(f"effort {encoding.effort} is not known", f"known: {', '.join(map(str, EFFORTS))}")
    known, pairs = importance or {}, list(zip(model.tensors, assignments, strict=True))
    works = [_work(tensor, each, encoding, known.get(tensor.name)) for tensor, each in pairs]
    pipeline = Pipeline(works, encoding.threads or usable_cores())
    return [TensorJob(tensor.name, tensor.shape, each.type, partial(pipeline.chunks, i)) for i, (tensor, each) in enumerate(pairs)]


def _work(tensor: TensorSource, assignment: Assignment, encoding: Encoding, importance: NDArray[np.float32] | None) -> Work:
    kind = assignment.type
    if assignment.group_size != BLOCK:
        check_group_size(tensor.name, kind, assignment.group_size, encoding.kernel)
    if importance is not None and kind != tensor.type:
        check_importance(tensor.name, tensor.shape, importance)
    kernel = KERNELS[encoding.kernel](kind, assignment.group_size, encoding.effort)

    def encode(start: int, stop: int) -> Chunk:
        if kind == tensor.type:
            return copied(tensor, start, stop)
        rows = tensor.rows(start, stop)
        check_finite(tensor, start, rows)
        data = np.empty((stop - start, kind.row_bytes(tensor.shape[-1])), np.uint8)
        for part, row in by_matrix(tensor.shape, start, stop, importance):
            data[part] = kernel(rows[part], row)
        if not validate(kind, data):
            bad = next(i for i in range(len(data)) if not validate(kind, data[i : i + 1]))
            largest = np.abs(rows[bad]).max()
            raise BadInput(
                f"{tensor.name}, {place(tensor.shape, start + bad)}: {kind.name} cannot hold its values, the largest is {largest:g}",
                "choose a type with a wider range, such as bf16",
            )
        return data.data.cast("B")

    return Work(encode, tensor.shape)


def copied(tensor: TensorSource, start: int, stop: int) -> bytes | memoryview:
    """Rows as they are stored, checked by ggml without decoding them. Raises BadInput for a bad weight, or a block with a bad scale."""
    data = tensor.raw(start, stop)
    if not validate(tensor.type, np.frombuffer(data, np.uint8)):
        if tensor.type.is_float:
            check_finite(tensor, start, tensor.rows(start, stop))
        raise BadInput(f"{tensor.name}: a {tensor.type.name} block has a scale that cannot be", "the source is damaged; download it again")
    return data


def check_group_size(name: str, kind: GGMLType, group_size: int, kernel: str) -> None:
    """Raises UsageError unless the blocks of `kind` can share scales over `group_size` weights with this kernel."""
    if kernel != "fast":
        raise UsageError(f"{name}: groups of {group_size} are only known to our kernels, not to {kernel}'s", "leave --kernel away")
    if kind.name not in GROUPED:
        raise UsageError(f"{name}: blocks of {kind.name} cannot share scales, only {', '.join(GROUPED)} can", "leave its group size at 32")
    if group_size not in GROUP_SIZES:
        raise UsageError(f"{name}: there is no group size {group_size}", f"known: {', '.join(map(str, GROUP_SIZES))}")


def usable_cores() -> int:
    """Cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> None:
    """Raises UsageError for a number of --threads that cannot be; None leaves it to us. llama.cpp ends the process beyond the most."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads: {threads} is not a number of threads", f"it must be 1 to {MOST_THREADS}")


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
