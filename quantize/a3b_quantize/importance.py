"""Importance of weights: what an importance matrix means for the kernels.

A mean over few tokens is noise: with one token it is worse than none at all. So each expert is drawn toward what is known besides, as if
that had been seen for some tokens more. Gate and up of all experts of a layer read the same channels, so there the prior is the mean over
the layer; the channels of a down projection are the expert's own, so there the prior is flat. benchmarks/bench_importance.py measures
what the constants are worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.roles import role_of
from a3b_gguf.tensors import Model
from a3b_quantize.fit_imatrix import fit_imatrix
from a3b_quantize.imatrix import Imatrix, ImatrixEntry
from a3b_quantize.weighting import Importance

SHARED_INPUT = ("expert_gate", "expert_up", "expert_gate_up")


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    """plain: exactly llama-quantize's values, sums / counts, and 1 where nothing was counted; the others do nothing then.

    shared_prior, own_prior: how many tokens the layer's mean counts for in gate and up, and a flat mean in the down projection of an
    expert; floor: no channel counts less than this share of its row's mean.
    """

    plain: bool = False
    shared_prior: float = 16.0
    own_prior: float = 4.0
    floor: float = 1e-4


def importance_of(imatrix: Imatrix, model: Model, options: ImportanceOptions) -> Importance:
    """Importance of each tensor of `model` that has an entry, as it has matrices. Raises BadInput where an entry does not fit."""
    entries = fit_imatrix(imatrix, model).imatrix.entries
    if options.plain or imatrix.is_legacy:  # a legacy file does not say how many tokens an expert saw
        return {name: plain_importance(entry) for name, entry in entries.items()}
    return {name: steady_importance(entry, role_of(name), options) for name, entry in entries.items()}


def plain_importance(entry: ImatrixEntry) -> NDArray[np.float32]:
    """Mean of x^2 by channel [n_mat, n_cols]; 1 throughout a matrix that was never used. Source: load_imatrix in llama-quantize"""
    counts = np.floor(entry.counts + np.float32(0.5))[:, None]  # lround
    return np.where(counts > 0, entry.sums / np.where(counts > 0, counts, 1), np.float32(1)).astype(np.float32)


def steady_importance(entry: ImatrixEntry, role: str, options: ImportanceOptions) -> NDArray[np.float32]:
    """Mean of x^2 by channel [n_mat, n_cols], drawn toward the prior of `role` where few tokens were seen, above zero everywhere."""
    sums, counts = entry.sums.astype(np.float64), entry.counts.astype(np.float64)[:, None]
    if len(sums) > 1:
        if role in SHARED_INPUT:
            weight, prior = options.shared_prior, sums.sum(axis=0) / max(counts.sum(), 1.0)
        else:
            weight, prior = options.own_prior, _flat(sums, counts)
        mean = (sums + weight * prior) / np.maximum(counts + weight, 1e-9)
    else:
        mean = sums / np.maximum(counts, 1e-9)
    row_mean = mean.mean(axis=1, keepdims=True)
    mean = np.where(row_mean > 0, np.maximum(mean, options.floor * row_mean), 1.0)  # 1: nothing is known, all count alike
    return mean.astype(np.float32)


def _flat(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each matrix's own mean over its channels [n_mat, 1]; the mean over all where a matrix saw nothing."""
    own = sums.mean(axis=1, keepdims=True) / np.maximum(counts, 1.0)
    everywhere = sums.mean() * len(sums) / max(counts.sum(), 1.0)
    flat: NDArray[np.float64] = np.where(counts > 0, own, everywhere)
    return flat
