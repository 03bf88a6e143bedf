"""Weights of a loaded model, replaced where they lie: to see what a change of one tensor does, without writing and loading a file."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import LoadedModel, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.symbols import ggml_function
from a3b_gguf.llama.watch import GGMLTensor
from a3b_gguf.tensors import TYPE_OF_NUMBER, GGMLType


class Weights:
    """The weights that `model` computes with, by name. The model must have been loaded without mmap: a mapped file cannot be written."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._tensors = _found_in_graph(model)
        self._n_bytes = ggml_function("ggml_nbytes", ctypes.c_size_t, [ctypes.c_void_p])
        arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._set = ggml_function("ggml_backend_tensor_set", None, arguments)
        self._get = ggml_function("ggml_backend_tensor_get", None, arguments)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def type(self, name: str) -> GGMLType:
        """The type that the tensor has in memory."""
        return TYPE_OF_NUMBER[GGMLTensor.from_address(self._tensors[name]).type]

    def read(self, name: str) -> NDArray[np.uint8]:
        """A copy of the whole tensor, as it is stored."""
        address = self._tensors[name]
        copy = np.empty(self._n_bytes(address), np.uint8)
        self._get(address, copy.ctypes.data, 0, copy.nbytes)
        return copy

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Replaces the whole tensor; contexts that are open see it from their next batch on. Raises ValueError for another size."""
        address = self._tensors[name]
        if data.nbytes != self._n_bytes(address):
            raise ValueError(f"{name} has {self._n_bytes(address):,} bytes, not {data.nbytes:,}")
        data = np.ascontiguousarray(data)
        self._set(address, data.ctypes.data, 0, data.nbytes)


def _found_in_graph(model: LoadedModel) -> dict[str, int]:
    """Name -> address of the ggml_tensor of each weight: llama.h hands none out, so they are taken from the inputs of graph nodes."""
    found: dict[str, int] = {}

    def look(address: int, ask: bool, _: Any) -> bool:
        for source in GGMLTensor.from_address(address).src:
            if source:
                tensor = GGMLTensor.from_address(source)
                name = tensor.name.decode(errors="replace")
                if tensor.op == 0 and name.endswith((".weight", ".bias")):  # 0: GGML_OP_NONE, nothing computes it
                    found[name] = source
        return False

    with open_context(model, LoadParams(n_ctx=256, n_batch=32, n_ubatch=32), look) as context:
        batch = Batch(1)
        batch.add(0, 0, [0], 1)
        status = decode(context, batch)
    if status:
        raise MachineLacks(f"llama.cpp cannot decode on {model.path}: llama_decode returned {status}", "look at the memory that is free")
    return found
