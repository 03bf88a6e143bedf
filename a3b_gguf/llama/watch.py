"""Activations while llama.cpp computes them: named nodes of the graph as numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import LoadedModel, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.symbols import ggml_function

ELEMENTS: dict[int, Any] = {0: np.float32, 26: np.int32}  # ggml types that are read
# Rows in a batch, each with logits: llama.cpp cuts its last layer down to the rows that want them.
N_BATCH = 64

# (name of the node, its values): row-major, so channels last and tokens first; a copy that the receiver may keep.
Receive = Callable[[str, NDArray[Any]], None]


class GGMLTensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h as of llama-cpp-python 0.3.36, which does not bind it; a test pins the layout."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )  # fmt: skip


def read_tensor(address: int) -> NDArray[Any] | None:
    """A copy of the ggml_tensor at `address`, row-major and without leading ones; None for a type that is not in ELEMENTS.

    Works for views with gaps and for tensors that live on a GPU.
    """
    tensor = GGMLTensor.from_address(address)
    dtype = ELEMENTS.get(tensor.type)
    if dtype is None:
        return None
    n_bytes = ggml_function("ggml_nbytes", ctypes.c_size_t, [ctypes.c_void_p])(address)
    copy = np.empty(n_bytes, np.uint8)
    get = ggml_function("ggml_backend_tensor_get", None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t])
    get(address, copy.ctypes.data, 0, n_bytes)
    n_dims = max((i + 1 for i in range(4) if tensor.ne[i] > 1), default=1)
    shape, strides = tuple(tensor.ne[:n_dims])[::-1], tuple(tensor.nb[:n_dims])[::-1]
    return np.lib.stride_tricks.as_strided(copy.view(dtype), shape, strides, writeable=False)


def watch(model: LoadedModel, tokens: Sequence[int], wanted: Callable[[str], bool], receive: Receive, n_threads: int = 1) -> None:
    """Decodes `tokens` as one sequence and calls `receive` for each computed node whose name is `wanted`.

    The computation stops after each such node, so want few. What `receive` raises ends the run and is raised here.
    Raises MachineLacks when llama.cpp cannot decode.
    """
    raised: list[BaseException] = []

    def callback(address: int, ask: bool, _: Any) -> bool:
        try:
            name = GGMLTensor.from_address(address).name.decode(errors="replace")
            if ask:
                return wanted(name)
            values = read_tensor(address)
            if values is not None:
                receive(name, values)
        except BaseException as error:  # it cannot travel through C; False stops the graph, and `watch` raises it
            raised.append(error)
            return False
        return True

    params = LoadParams(
        n_ctx=-(-len(tokens) // 256) * 256,
        n_batch=N_BATCH,
        n_ubatch=N_BATCH,
        n_outputs_max=N_BATCH,
        n_threads=n_threads,
        n_threads_batch=n_threads,
    )
    with open_context(model, params, callback) as context:
        batch = Batch(N_BATCH)
        for start in range(0, len(tokens), N_BATCH):
            rows = tokens[start : start + N_BATCH]
            batch.clear()
            batch.add(0, start, rows, len(rows))
            status = decode(context, batch)
            if raised:
                raise raised[0]
            if status:
                raise MachineLacks(
                    f"llama.cpp cannot decode on {model.path}: llama_decode returned {status}", "look at the memory that is free"
                )
