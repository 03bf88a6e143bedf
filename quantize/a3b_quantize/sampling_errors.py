"""The error that a type would make in a tensor, from a sample of its rows: relative to what the tensor puts out.

A linear layer y = W x with independent inputs of mean square w_j changes by sum_j w_j (W - W')_ij^2 in the mean square of y_i. Divided
by the same sum over W itself, it is the noise-to-signal ratio of the layer's output. Experts count as often as they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.ggml import dequantize
from a3b_gguf.metadata import Metadata
from a3b_gguf.tensors import GGMLType, Model, TensorSource
from a3b_quantize.assign import Assignment
from a3b_quantize.encode import Encoding, jobs
from a3b_quantize.weighting import Importance

SAMPLE_WEIGHTS = 1 << 17  # of one tensor; a smaller one is taken whole
MOST_EXPERTS = 16

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of a tensor, and a TensorSource of just these. values: float32 [n_mat, rows, cols]; importance: [n_mat, cols];
    usage: how often each matrix is used, [n_mat]."""

    name: str
    source: GGMLType
    values: Floats
    importance: Floats | None
    usage: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def type(self) -> GGMLType:
        return self.source

    def rows(self, start: int, stop: int) -> Floats:
        return self.values.reshape(-1, self.values.shape[-1])[start:stop]

    def raw(self, start: int, stop: int) -> bytes:
        raise NotImplementedError("a sample is never copied")


def take_sample(
    tensor: TensorSource, importance: Floats | None, usage: NDArray[np.float64] | None, most_weights: int = SAMPLE_WEIGHTS
) -> Sample:
    """Evenly spaced experts, and of each evenly spaced rows, `most_weights` weights in all. importance: [n_mat, cols]; usage: [n_mat]."""
    shape = tensor.shape
    n_mat, n_row, n_col = prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]
    experts = np.unique(np.linspace(0, n_mat - 1, min(n_mat, MOST_EXPERTS if prod(shape) > most_weights else n_mat)).round().astype(int))
    each = max(1, most_weights // (n_col * len(experts)))
    starts = _spans(n_row, min(n_row, each))
    firsts = [int(expert) * n_row for expert in experts]
    blocks = [np.concatenate([tensor.rows(first + start, first + stop) for start, stop in starts]) for first in firsts]
    return Sample(
        tensor.name,
        tensor.type,
        np.stack(blocks),
        None if importance is None else importance[experts],
        np.ones(len(experts)) if usage is None else usage[experts],
    )


def _spans(n_row: int, wanted: int, most: int = 8) -> list[tuple[int, int]]:
    """Up to `most` runs of rows, evenly spaced, `wanted` rows in all: reading runs is faster than reading rows."""
    if wanted >= n_row:
        return [(0, n_row)]
    parts = min(most, wanted)
    length = wanted // parts
    return [(start, start + length) for start in np.linspace(0, n_row - length, parts).round().astype(int).tolist()]


def relative_errors(sample: Sample, kinds: Sequence[GGMLType], encoding: Encoding) -> dict[str, float]:
    """Type name -> noise-to-signal ratio of the sample's output. A type that is the tensor's own makes no error."""
    return {kind.name: 0.0 if kind == sample.source else relative_error(sample, encoded(sample, kind, encoding)) for kind in kinds}


def relative_error(sample: Sample, values: Floats) -> float:
    """Noise-to-signal ratio of the sample's output when its weights are replaced with `values`, of the same shape."""
    noise, signal = energies(sample, values)
    return noise / signal if signal else 0.0


def energies(sample: Sample, values: Floats) -> tuple[float, float]:
    """Energy of the output's noise when the weights are replaced with `values`, and of the output itself, matrices by their usage."""
    weights = np.ones((1, 1), np.float64) if sample.importance is None else sample.importance.astype(np.float64)
    difference = (values - sample.values).astype(np.float64)
    noise = ((difference * difference).sum(axis=1) * weights).sum(axis=1)
    signal = ((sample.values.astype(np.float64) ** 2).sum(axis=1) * weights).sum(axis=1)
    return float((noise * sample.usage).sum()), float((signal * sample.usage).sum())


def encoded(sample: Sample, kind: GGMLType, encoding: Encoding) -> Floats:
    """The sample's weights as `kind` would give them back, float32 [n_mat, rows, cols]."""
    assignment = Assignment(sample.name, sample.shape, sample.source, kind, "", "")
    importance: Importance = {} if sample.importance is None else {sample.name: sample.importance}
    metadata: Metadata = {}
    (job,) = jobs(Model(metadata, (sample,)), [assignment], encoding, importance)
    data = b"".join(bytes(chunk) for chunk in job.chunks())
    return dequantize(kind, data).reshape(sample.shape)
