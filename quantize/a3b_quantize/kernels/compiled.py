"""How kernels are compiled: by numba, to machine code of this CPU, kept on disk, with the GIL free while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
# A float32, or an integer, inside of a kernel: numba infers which, and mypy's picture of numpy scalars does not fit.
Scalar = Any
F = TypeVar("F", bound=Callable[..., Any])
# Sums may be reordered, which is what lets LLVM vectorize them. NaN and infinity keep their meaning (no nnan, no ninf): a scale
# that float16 cannot hold must come out as infinity, so that it is found and refused.
FAST = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: F) -> F:
    """A kernel that Python calls: compiled at its first call, or loaded from the cache on disk where that can be written."""
    try:
        kernel: F = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST)(function)
    except RuntimeError:  # numba finds no folder that it can write: compile in every process
        kernel = numba.njit(nogil=True, error_model="numpy", fastmath=FAST)(function)
    return kernel


def inlined(function: F) -> F:
    """A part of kernels, melted into each by LLVM."""
    part: F = numba.njit(error_model="numpy", fastmath=FAST, forceinline=True)(function)
    return part


def number(value: float) -> Scalar:
    """A float32 constant; a plain Python number would make a kernel compute in float64."""
    return np.float32(value)


ZERO, ONE = number(0), number(1)
