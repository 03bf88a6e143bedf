"""How much each tensor lost: what was written is decoded and compared with the source, row by row, in threads.

Errors are relative and squared: the sum of (written - source)^2 over the sum of source^2; weighted: each column's squares times its
importance. A second pass over both files, so it does not matter whether a run was interrupted in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.ggml import dequantize
from a3b_gguf.roles import layer_of
from a3b_gguf.tensors import TensorSource, n_rows
from a3b_quantize.assign import Assignment
from a3b_quantize.encode import KERNELS, Encoding, usable_cores
from a3b_quantize.imatrix import ImatrixEntry
from a3b_quantize.kernels import BLOCK
from a3b_quantize.pipeline import CHUNK_WEIGHTS, spans
from a3b_quantize.weighting import by_matrix

WORST = 3  # rows of each tensor that are named
SAMPLE_SPANS = 16  # where rows are taken to tell the price of a group size: a million weights in all
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowError:
    """expert: None where the tensor has none."""

    expert: int | None
    row: int
    error: float


@dataclass(frozen=True, slots=True)
class TensorError:
    """What one tensor lost. energy: the sum of source^2, weighted_energy: times importance; None without importance.

    coverage: share of its matrices (experts) that calibration used; group_price: how much larger the error is than with a scale for
    each block, on a sample of rows: 0.2 is 20 % more; None where every block has its own.
    """

    name: str
    role: str
    layer: int | None
    source: str
    type: str
    group_size: int
    n_weights: int
    nbytes: int
    error: float
    energy: float
    weighted_error: float | None
    weighted_energy: float | None
    coverage: float | None
    group_price: float | None
    worst: tuple[RowError, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor before and after, and what is known about it. importance: as it was encoded with; entry: of the importance matrix."""

    source: TensorSource
    written: TensorSource
    assignment: Assignment
    importance: Array | None
    entry: ImatrixEntry | None


def measure_errors(pairs: Sequence[Pair], encoding: Encoding, tell: Callable[[int, str], None] | None = None) -> Iterator[TensorError]:
    """The error of each tensor, in order. Memory: two chunks of about a million weights a thread. tell: bytes that were compared."""
    done = 0
    with ThreadPoolExecutor(encoding.threads or usable_cores(), thread_name_prefix="errors") as pool:
        for pair in pairs:
            yield _measure(pair, encoding, pool)
            done += pair.assignment.nbytes
            if tell:
                tell(done, pair.assignment.name)


def _measure(pair: Pair, encoding: Encoding, pool: ThreadPoolExecutor) -> TensorError:
    each, shape = pair.assignment, pair.assignment.shape
    if each.type == each.source:  # copied byte for byte
        return _line(pair, np.zeros((4, 1)), (), None)
    parts = list(pool.map(partial(_compare, pair), spans(shape)))
    rows = np.concatenate(parts, axis=1)
    price = None
    if each.group_size != BLOCK:
        both = np.sum(list(pool.map(partial(_ungrouped, pair, encoding), _sample(shape))), axis=0)
        price = float(both[0] / both[1] - 1) if both[1] else 0.0
    return _line(pair, rows.sum(axis=1, keepdims=True), _worst(rows, shape), price)


def _compare(pair: Pair, span: tuple[int, int]) -> NDArray[np.float64]:
    """float64 [4, rows]: squared error and energy of each row, then both weighted (0 without importance)."""
    start, stop = span
    source = pair.source.rows(start, stop)
    lost, energy = _squares(source, _written(pair, start, stop))
    out = np.zeros((4, stop - start))
    out[0], out[1] = lost.sum(axis=1, dtype=np.float64), energy.sum(axis=1, dtype=np.float64)
    if pair.importance is not None:
        for part, row in by_matrix(pair.source.shape, start, stop, pair.importance):
            weight = np.ones(source.shape[1], np.float32) if row is None else row
            out[2, part], out[3, part] = lost[part] @ weight, energy[part] @ weight
    return out


def _ungrouped(pair: Pair, encoding: Encoding, span: tuple[int, int]) -> NDArray[np.float64]:
    """[2]: the squared error as written, and what it would be with a scale for each block."""
    start, stop = span
    kind = pair.assignment.type
    source = pair.source.rows(start, stop)
    kernel = KERNELS[encoding.kernel](kind, BLOCK, encoding.effort)
    alone = np.empty((stop - start, kind.row_bytes(source.shape[1])), np.uint8)
    for part, row in by_matrix(pair.source.shape, start, stop, pair.importance):
        alone[part] = kernel(source[part], row)
    grouped = _squares(source, _written(pair, start, stop))[0]
    single = _squares(source, dequantize(kind, alone.reshape(-1)).reshape(source.shape))[0]
    return np.array([grouped.sum(dtype=np.float64), single.sum(dtype=np.float64)])


def _written(pair: Pair, start: int, stop: int) -> Array:
    return dequantize(pair.assignment.type, pair.written.raw(start, stop)).reshape(stop - start, -1)


def _squares(source: Array, written: Array) -> tuple[Array, Array]:
    """(written - source)^2 and source^2, scaled alike where float32 would overflow."""
    largest = np.float32(np.abs(source).max(initial=0))
    if largest > 1e15:
        source, written = source / largest, written / largest
    lost = written - source
    return lost * lost, source * source


def _worst(rows: NDArray[np.float64], shape: tuple[int, ...]) -> tuple[RowError, ...]:
    relative = np.divide(rows[0], rows[1], out=np.zeros(rows.shape[1]), where=rows[1] > 0)
    found = np.argsort(-relative, kind="stable")[:WORST]
    height = shape[-2] if len(shape) > 2 else 0
    return tuple(RowError(int(i) // height if height else None, int(i) % height if height else int(i), float(relative[i])) for i in found)


def _sample(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of rows at even distances, a million weights in all."""
    rows = n_rows(shape)
    step = max(1, CHUNK_WEIGHTS // SAMPLE_SPANS // shape[-1])
    if rows <= SAMPLE_SPANS * step:
        return [(0, rows)]
    return [(at := i * (rows - step) // (SAMPLE_SPANS - 1), at + step) for i in range(SAMPLE_SPANS)]


def _line(pair: Pair, sums: NDArray[np.float64], worst: tuple[RowError, ...], price: float | None) -> TensorError:
    each, (lost, energy, weighted, weighted_energy) = pair.assignment, map(float, sums[:, 0])
    has = pair.importance is not None
    return TensorError(
        each.name, each.role, layer_of(each.name), each.source.name, each.type.name, each.group_size, prod(each.shape), each.nbytes,
        error=lost / energy if energy else 0.0, energy=energy,
        weighted_error=(weighted / weighted_energy if weighted_energy else 0.0) if has else None,
        weighted_energy=weighted_energy if has else None,
        coverage=None if pair.entry is None else float((pair.entry.counts >= 0.5).mean()),
        group_price=price, worst=worst,
    )  # fmt: skip
