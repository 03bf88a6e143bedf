"""Fast kernels: float32 rows in, the blocks of a ggml type out. Compiled by numba when first used; see the table at the end.

The same format as ggml's kernels, a search that reaches further, and at most ggml's error. The bytes differ from ggml's where two
choices are as good or where rounding against the float16 scale is better. They do not depend on threads or chunks; on another kind of
CPU sums may be added in another order, and a choice between near equals may fall the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from a3b_gguf.errors import BadInput
from a3b_gguf.tensors import TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Weights that share a scale in IQ4_NL; larger groups are made of neighbouring blocks that get the same one.
BLOCK = 32
GROUP_SIZES = (32, 64, 128)
GROUPED = ("iq4_nl",)
# How much is tried for a smaller error: 1 about as much as ggml, 3 all that still pays. 2 is the best price (benchmarks/bench_kernels.py).
EFFORTS = (1, 2, 3)
DEFAULT_EFFORT = 2
# No importance is less than this share of the largest in its block: a channel that was never seen still counts a little.
LEAST_IMPORTANCE = 1e-6


def checked_importance(importance: NDArray[np.float32], n_cols: int, block: int) -> NDArray[np.float32]:
    """Importance of `n_cols` columns, of each `block` of them divided by its largest, and at least LEAST_IMPORTANCE.

    Raises BadInput for a wrong length and for values that are NaN, infinite or negative, with the column. A block of zeros counts alike.
    """
    if importance.shape != (n_cols,):
        raise BadInput(f"importance has shape {list(importance.shape)}, the rows have {n_cols} columns")
    bad = np.flatnonzero(~(np.isfinite(importance) & (importance >= 0)))
    if bad.size:
        raise BadInput(
            f"importance of column {bad[0]} is {importance[bad[0]]}", "it must be finite and at least 0: the importance matrix is damaged"
        )
    blocks = np.pad(importance.astype(np.float64), (0, -n_cols % block)).reshape(-1, block)
    largest = blocks.max(axis=1, keepdims=True)
    shares = np.where(largest > 0, blocks / np.where(largest > 0, largest, 1), 1)
    return np.ascontiguousarray(np.maximum(shares, LEAST_IMPORTANCE).reshape(-1)[:n_cols], np.float32)


def _compiled(module: str, name: str) -> Any:
    return getattr(import_module(f"a3b_quantize.kernels.{module}"), name)  # here, since it imports numba


def _run(
    module: str,
    name: str,
    rows: NDArray[np.float32],
    importance: NDArray[np.float32] | None = None,
    *,
    group_size: int = BLOCK,
    effort: int = DEFAULT_EFFORT,
) -> NDArray[np.uint8]:
    """Encodes rows with one kernel. Raises BadInput for shapes that do not fit and for importance that is not finite or negative.

    group_size: of GROUP_SIZES, for types of GROUPED; effort: of EFFORTS.
    """
    kind, n_cols = TYPES[name], rows.shape[1]
    out = np.empty((len(rows), kind.row_bytes(n_cols)), np.uint8)
    weights = np.ones(1, np.float32) if importance is None else checked_importance(importance, n_cols, max(kind.block, group_size))
    shared = (group_size // BLOCK,) if name in GROUPED else ()
    _compiled(module, name)(np.require(rows, np.float32, ["C", "W"]), weights, importance is not None, effort, *shared, out)
    return out


# Each takes rows float32 [n, columns], importance float32 [columns] or None, group_size and effort, and returns uint8 [n, bytes of a row].
# The GIL is free meanwhile. Types that are not here are written by ggml.
KERNELS: dict[str, partial[NDArray[np.uint8]]] = {
    "iq4_nl": partial(_run, "blocks", "iq4_nl"),
    "iq4_xs": partial(_run, "superblock", "iq4_xs"),
    "q8_0": partial(_run, "linear", "q8_0"),
    "q4_0": partial(_run, "blocks", "q4_0"),
    "q6_k": partial(_run, "superblock", "q6_k"),
    "q3_k": partial(_run, "superblock", "q3_k"),
    "q4_k": partial(_run, "affine", "q4_k"),
    "q5_k": partial(_run, "affine", "q5_k"),
    "mxfp4": partial(_run, "microscaling", "mxfp4"),
}


def make_ready(names: Collection[str], say: Callable[[str], None]) -> None:
    """Compiles the kernels of these types, or loads them; `say` is told before a compilation, which takes seconds and happens once.

    Without a folder that can be written there is no cache, and each process compiles.
    """
    wanted = [name for name in KERNELS if name in names]
    for name in wanted:
        _discard_stale(*KERNELS[name].args)
    missing = [name for name in wanted if not _on_disk(*KERNELS[name].args)]
    if missing:
        say(f"compiling kernels, once: {', '.join(missing)}")
    for name in wanted:
        KERNELS[name](np.zeros((1, TYPES[name].block), np.float32))


def _discard_stale(module: str, name: str) -> None:
    """Removes what was compiled before the newest of these sources: numba looks at a kernel's own file only, not at what it inlines."""
    folder = _compiled(module, name).stats.cache_path
    if folder is None:
        return
    newest = max(source.stat().st_mtime for source in Path(__file__).parent.glob("*.py"))
    for index in Path(folder).glob(f"{module}.{name}-*.nbi"):
        if index.stat().st_mtime < newest:
            index.unlink(missing_ok=True)


def _on_disk(module: str, name: str) -> bool:
    folder = _compiled(module, name).stats.cache_path
    return folder is not None and any(Path(folder).glob(f"{module}.{name}-*.nbi"))
