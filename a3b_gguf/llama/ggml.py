"""ggml's own kernels: float32 rows to blocks, as llama-quantize calls them, so the bytes are the same; and blocks back to float32."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, MachineLacks, UsageError
from a3b_gguf.llama.symbols import ggml_function
from a3b_gguf.tensors import TYPES, GGMLType

# Types that ggml computes with but has no quantizer for. Source: the switch of ggml_quantize_chunk in ggml.c
NOT_WRITABLE = ("q8_1", "q8_k", "i8", "i16", "i32", "i64", "f64")
WRITABLE = tuple(kind for kind in TYPES.values() if kind.name not in NOT_WRITABLE)


@cache
def _kernels() -> tuple[Any, Any, Any]:
    quantize = ggml_function(
        "ggml_quantize_chunk",
        ctypes.c_size_t,
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p],
    )
    valid = ggml_function("ggml_validate_row_data", ctypes.c_bool, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t])
    requires = ggml_function("ggml_quantize_requires_imatrix", ctypes.c_bool, [ctypes.c_int])
    return quantize, valid, requires


class _Traits(ctypes.Structure):
    """struct ggml_type_traits in ggml.h, as far as to_float."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    ]


@cache
def _to_float(kind: GGMLType) -> Any:
    traits = ggml_function("ggml_get_type_traits", ctypes.POINTER(_Traits), [ctypes.c_int])(kind.number).contents
    if not traits.to_float:
        raise UsageError(f"ggml cannot turn {kind.name} into float32")
    if (traits.blck_size, traits.type_size) != (kind.block, kind.block_bytes):  # another version of ggml would have another struct
        raise MachineLacks(f"the installed ggml describes {kind.name} in another way", "install the version that a3b's pyproject.toml pins")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(traits.to_float)


def dequantize(kind: GGMLType, data: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of any type that ggml computes with as float32, flat. Safe to call from several threads; the GIL is free meanwhile."""
    blocks = np.frombuffer(data, np.uint8)
    if blocks.size % kind.block_bytes:
        raise BadInput(f"{blocks.size} bytes are not a whole number of {kind.name} blocks of {kind.block_bytes}")
    out = np.empty(blocks.size // kind.block_bytes * kind.block, np.float32)
    if kind.name == "f32":
        out[:] = blocks.view(np.float32)
    elif out.size:
        _to_float(kind)(blocks.ctypes.data, out.ctypes.data, out.size)
    return out


def requires_importance(kind: GGMLType) -> bool:
    """Whether ggml aborts without an importance vector. llama-quantize asks for one for more types: see a3b_quantize.stock."""
    return bool(_kernels()[2](kind.number))


def quantize_chunk(kind: GGMLType, rows: NDArray[np.float32], importance: NDArray[np.float32] | None = None) -> NDArray[np.uint8]:
    """Encodes float32 rows [n, columns] as `kind` and returns uint8 [n, bytes of a row].

    importance: float32 [columns], one weight a column, or none. Safe to call from several threads; the GIL is free meanwhile.
    The values are not checked: a NaN makes a block of zeros that validates (`a3b_quantize.encode` checks before it calls).
    Raises UsageError for a type that ggml cannot write or that needs an importance vector, BadInput for shapes that do not fit.
    """
    if kind.name in NOT_WRITABLE:
        raise UsageError(f"ggml cannot write {kind.name}", f"it can write {', '.join(known.name for known in WRITABLE)}")
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise TypeError(f"rows must be float32 [n, columns], not {rows.dtype} {list(rows.shape)}")
    n_rows, n_cols = rows.shape
    row_bytes = kind.row_bytes(n_cols)
    rows = np.ascontiguousarray(rows)
    quantize, _, requires = _kernels()
    weights = None
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (n_cols,):
            raise BadInput(f"importance has shape {list(importance.shape)}, the rows have {n_cols} columns")
        weights = importance.ctypes.data
    elif requires(kind.number):
        raise UsageError(f"{kind.name} cannot be written without an importance matrix", "choose a type of at least 3 bits")
    out = np.empty((n_rows, row_bytes), np.uint8)
    if n_rows and quantize(kind.number, rows.ctypes.data, out.ctypes.data, 0, n_rows, n_cols, weights) != out.nbytes:
        raise RuntimeError(f"ggml_quantize_chunk wrote another number of bytes than {out.nbytes} for {kind.name}")
    return out


def validate(kind: GGMLType, data: NDArray[np.uint8]) -> bool:
    """Whether ggml finds no NaN, infinity or impossible scale in encoded rows. It sees scales only, not what became of a bad weight."""
    data = np.ascontiguousarray(data)
    return bool(_kernels()[1](kind.number, data.ctypes.data, data.nbytes))
