"""A GGUF file as a Model: its tensors can be read row by row, so quantize takes it like a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import TensorInfo
from a3b_gguf.split import read_parts, without_split
from a3b_gguf.tensors import GGMLType, Model


class OpenFile:
    """Owns a file descriptor for as long as a tensor needs it. Reads by position, so threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1  # where opening fails there is nothing to close
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Exactly `n_bytes`. Raises BadInput when the file has become shorter than its header says."""
        data = os.pread(self._descriptor, n_bytes, offset)
        if len(data) != n_bytes:
            found, expected = offset + len(data), offset + n_bytes
            raise BadInput(f"{self.path} ends at byte {found:,}, {expected:,} were expected: it changed while it was read")
        return data


class GGUFTensor:
    """A TensorSource over a range of an open file."""

    def __init__(self, info: TensorInfo, file: OpenFile) -> None:
        self._info, self._file = info, file

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    @property
    def type(self) -> GGMLType:
        return self._info.type

    def raw(self, start: int, stop: int) -> bytes:
        width = self.type.row_bytes(self.shape[-1])
        return self._file.read(self._info.offset + start * width, (stop - start) * width)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return to_float32(self.raw(start, stop), self.type).reshape(stop - start, self.shape[-1])


def to_float32(data: bytes | memoryview, kind: GGMLType) -> NDArray[np.float32]:
    """Stored bytes of any ggml type as float32, flat. Float types here, blocks by gguf-py's reference dequantizer."""
    if kind.name == "f32":
        return np.frombuffer(data, np.float32)
    if kind.name == "f16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    if kind.name == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind.name == "f64":
        return np.frombuffer(data, np.float64).astype(np.float32)
    import gguf  # costs a quarter of a second, and only requantizing needs it

    blocks = np.frombuffer(data, np.uint8).reshape(-1, kind.block_bytes)
    values: NDArray[np.float32] = gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind.number))
    return values.reshape(-1)


def open_gguf_model(path: Path) -> Model:
    """The file as a Model, arrays of its metadata included; all parts of a split model when `path` is the first.

    The files stay open as long as their tensors live. What says how the file was laid out is no metadata of the model.
    """
    parts = read_parts(path, arrays=True)
    tensors: list[GGUFTensor] = []
    for part in parts:
        handle = OpenFile(part.path)
        tensors += [GGUFTensor(info, handle) for info in part.tensors]
    metadata = dict(parts[0].metadata)
    metadata.pop("general.alignment", None)
    return Model(without_split(metadata), tuple(tensors))
