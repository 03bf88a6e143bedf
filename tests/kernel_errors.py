"""What kernels are measured with: inputs of every kind, and the error that each kernel minimises. Used by tests and the benchmark."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.gguf_model import to_float32
from a3b_gguf.tensors import TYPES

Floats = NDArray[np.float32]


def distributions(n_rows: int, n_cols: int) -> dict[str, Floats]:
    """Rows of each kind, the same at every call. Weights of models have a standard deviation near 0.02."""
    rng = np.random.default_rng(7)
    shape = n_rows, n_cols
    gaussian = rng.standard_normal(shape)
    rows = {
        "gaussian": gaussian * 0.02,
        "student-t 3": rng.standard_t(3, shape) * 0.02,
        "sparse 5 %": np.where(rng.random(shape) < 0.05, gaussian, 0) * 0.02,
        "constant": np.repeat(rng.standard_normal(n_rows * n_cols // 256), 256).reshape(shape),
        "x 1e-5": gaussian * 1e-5,
        "x 1e-20": gaussian * 1e-20,
        "denormal": gaussian * 1e-40,
        "x 1e4": gaussian * 1e4,
    }
    return {title: np.ascontiguousarray(values, np.float32) for title, values in rows.items()}


def importance_of(n_cols: int) -> Floats:
    """Importance as uneven as that of channels, with some that were never seen."""
    rng = np.random.default_rng(11)
    return np.where(rng.random(n_cols) < 0.02, 0, rng.gamma(0.3, 1, n_cols)).astype(np.float32)


def kernel_weights(name: str, rows: NDArray[np.float64], importance: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """How much each squared error counts in the search of ggml's kernel. Source: ggml-quants.c, the function of each type."""
    square = rows * rows
    if importance is None:
        if name in ("iq4_nl", "iq4_xs", "q6_k", "q3_k"):
            return square
        return root(means(square, 32)) + np.abs(rows) if name in ("q4_k", "q5_k") else np.ones_like(rows)
    if name in ("q6_k", "q8_0", "mxfp4"):
        return importance * np.ones_like(rows)
    spread = means(square, rows.shape[1]) if name == "q4_0" else 2 * means(square, TYPES[name].block)
    return importance * root(spread + square)


def means(square: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """For each weight the mean over its block."""
    return np.repeat(square.reshape(len(square), -1, block).mean(-1), block, axis=1)


def root(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(x), np.float64)


def relative_error(name: str, data: NDArray[np.uint8], rows: Floats, importance: Floats | None, plain: bool = False) -> float:
    """Weighted squared error of blocks over the weighted square of the rows; plain: all weights alike."""
    exact = rows.astype(np.float64)
    weights = np.ones_like(exact) if plain else kernel_weights(name, exact, None if importance is None else importance.astype(np.float64))
    weights = weights / weights.max() if weights.max() > 0 else np.ones_like(exact)
    off = to_float32(data.data.cast("B"), TYPES[name]).reshape(rows.shape) - exact
    return float((weights * off * off).sum() / (weights * exact * exact).sum())
