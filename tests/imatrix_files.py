"""Importance matrices for tests: made up for a model, as llama.cpp's tools would write them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import n_rows
from a3b_quantize.assign import n_dims
from a3b_quantize.imatrix import Imatrix, ImatrixEntry


def made_up(path: Path, seed: int = 0, mtp: bool = True) -> Imatrix:
    """Entries for every weight in the blocks of the GGUF at `path`: log-normal channels, uneven counts, one expert that was never used.

    mtp: whether the MTP block has entries, which no tool makes but low-bit types need.
    """
    rng, entries = np.random.default_rng(seed), {}
    model = open_gguf_model(path)
    last = max(int(tensor.name.split(".")[1]) for tensor in model.tensors if tensor.name.startswith("blk."))
    for tensor in model.tensors:
        if not tensor.name.startswith("blk.") or n_dims(tensor.shape) < 2 or (not mtp and tensor.name.startswith(f"blk.{last}.")):
            continue
        n_mat, n_cols = prod(tensor.shape[:-2]), tensor.shape[-1]
        counts = np.full(n_mat, 4096.0) if n_mat == 1 else rng.integers(1, 500, n_mat).astype(np.float64)
        if n_mat > 1:
            counts[1] = 0
        means = np.exp(rng.standard_normal((n_mat, n_cols)))
        entries[tensor.name] = ImatrixEntry((means * counts[:, None]).astype(np.float32), counts.astype(np.float32))
    return Imatrix(entries, chunk_size=512, chunk_count=8, datasets=("calibration.txt", "more.txt"))


def values_of(imatrix: Imatrix) -> dict[str, NDArray[np.float32]]:
    """What llama-quantize makes of it: sums / counts, 1 where a count is 0. Source: load_imatrix in tools/quantize/quantize.cpp"""
    found = {}
    for name, entry in imatrix.entries.items():
        rows = [sums / count if count > 0 else np.ones_like(sums) for sums, count in zip(entry.sums, entry.counts, strict=True)]
        found[name] = np.concatenate(rows).astype(np.float32)
    return found


def digests(path: Path) -> dict[str, str]:
    """The start of sha256 of each tensor of a GGUF."""
    model = open_gguf_model(path)
    return {each.name: hashlib.sha256(bytes(each.raw(0, n_rows(each.shape)))).hexdigest()[:16] for each in model.tensors}


def write_dat(path: Path, values: Mapping[str, NDArray[np.float32]], calls: int = 3, dataset: str = "old.txt") -> Path:
    """The older format, as save_imatrix_legacy in tools/imatrix/imatrix.cpp writes it. values: means, which it stores times the calls."""
    out = struct.pack("<i", len(values))
    for name, each in sorted(values.items()):
        data = (each * np.float32(calls)).astype(np.float32)
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, data.size) + data.tobytes()
    out += struct.pack("<ii", 8, len(dataset)) + dataset.encode()
    path.write_bytes(out)
    return path
