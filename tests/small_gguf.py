"""Small GGUF files for tests of quantizing: written from arrays, or cut from the embedded model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.metadata import Metadata, f32, string, u32
from a3b_gguf.tensors import TYPES, TensorJob, TensorSource


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.float32]], metadata: Metadata | None = None, kind: str = "f32") -> Path:
    """A GGUF with these tensors, as f32 or f16; by default it claims to be a dense llama of one layer."""

    def job(name: str, values: NDArray[np.float32]) -> TensorJob:
        stored = values.astype(np.float16 if kind == "f16" and values.ndim > 1 else np.float32)
        return TensorJob(name, values.shape, TYPES["f16" if stored.dtype == np.float16 else "f32"], lambda: iter([stored.tobytes()]))

    write_gguf(path, metadata or llama_metadata(), [job(name, values) for name, values in arrays.items()])
    return path


def llama_metadata(n_layer: int = 1, n_head: int = 2, n_head_kv: int = 2) -> Metadata:
    """What llama.cpp's loader asks of a llama before it quantizes it."""
    return {
        "general.architecture": string("llama"),
        "llama.block_count": u32(n_layer),
        "llama.context_length": u32(128),
        "llama.embedding_length": u32(64),
        "llama.feed_forward_length": u32(64),
        "llama.attention.head_count": u32(n_head),
        "llama.attention.head_count_kv": u32(n_head_kv),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-6),
    }


def narrow(source: Path, path: Path, rows: int = 16) -> Path:
    """A copy of a GGUF in which every matrix keeps its first `rows` rows, of every expert. No model any more, but all its names."""
    model = open_gguf_model(source)
    write_gguf(path, model.metadata, [_cut(tensor, rows) for tensor in model.tensors])
    return path


def _cut(tensor: TensorSource, rows: int) -> TensorJob:
    shape = tensor.shape
    if len(shape) < 2:
        return TensorJob(tensor.name, shape, tensor.type, lambda: iter([tensor.raw(0, 1)]))
    kept = min(rows, shape[-2])
    starts = range(0, int(np.prod(shape[:-1])), shape[-2])

    def chunks() -> Iterator[bytes | memoryview]:
        for start in starts:
            yield tensor.raw(start, start + kept)

    return TensorJob(tensor.name, (*shape[:-2], kept, shape[-1]), tensor.type, chunks)
