"""How much the predictions change when a tensor's output gets noisy: KL divergence (nats a token) per unit of noise-to-signal ratio.

Measured on the model itself: each tensor in turn is replaced in memory by what PROBE would make of it, and the same text is predicted
again. One position where a router flips can outweigh a thousand others, so a position's divergence counts up to CAP. Or estimated from
a calibration (sensitivity_estimate.py), or taken from a table that was measured like this on two small models: `from_table`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.scoring import scored_blocks
from a3b_gguf.llama.weights import Weights
from a3b_gguf.tensors import TYPES, GGMLType, TensorSource
from a3b_gguf.user_cache import keep_text
from a3b_quantize.allocate import by_layer
from a3b_quantize.assign import fit
from a3b_quantize.divergence import BaseRows, base_rows, compare, joined
from a3b_quantize.encode import Encoding
from a3b_quantize.sampling_errors import Floats, Sample, encoded, energies

PROBE = "q3_k"
CAP = 0.25  # nats
TABLE = "sensitivity.json"
PIECE_WEIGHTS = 1 << 22  # of a probe that are in memory at once
SUFFIX = re.compile(r"(?:blk\.\d+\.)?(.+)\.weight")


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """values: by tensor. measured: whether on this very model; how: one clause for people."""

    values: Mapping[str, float]
    measured: bool
    how: str

    def of(self, name: str) -> float | None:
        """Of a tensor; of one that was not run (the MTP block's), the median of the tensors of its kind."""
        if name in self.values:
            return self.values[name]
        alike = [value for other, value in self.values.items() if kind_of(other) == kind_of(name)]
        return median(alike) if alike else None


def kind_of(name: str) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`."""
    match = SUFFIX.fullmatch(name)
    return match[1] if match else name


def measure(
    path: Path,
    tensors: Sequence[TensorSource],
    chunks: NDArray[np.int32],
    weighting: Callable[[str], tuple[Floats | None, NDArray[np.float64] | None]],
    encoding: Encoding,
    tell: Callable[[int, int], None],
    found: dict[str, float] | None = None,
) -> dict[str, float]:
    """Sensitivity of each of `tensors` that the model at `path`, a float GGUF, computes with.

    chunks: tokens to predict, int32 [n_chunk, n_ctx]; weighting: importance and usage of a tensor by name, as `take_sample` takes them.
    found: filled as it goes; what is in it already is not measured again.
    """
    params = LoadParams(n_ctx=chunks.shape[1], use_mmap=False, n_threads=encoding.threads or 1, n_threads_batch=encoding.threads or 1)
    found = {} if found is None else found
    with load_model(path, params) as model:
        weights = Weights(model)
        base = [joined([base_rows(b.logits, b.following)]) for b in scored_blocks(model, params, chunks)]
        for number, tensor in enumerate(tensors):
            if tensor.name in found:
                continue
            if tensor.name in weights.names:
                kept = weights.read(tensor.name)
                data, error = probe(tensor, *weighting(tensor.name), encoding, weights.type(tensor.name))
                weights.write(tensor.name, data)
                change = capped_divergence(base, ((b.logits, b.following) for b in scored_blocks(model, params, chunks)))
                weights.write(tensor.name, kept)
                if error > 0:
                    found[tensor.name] = change / error
            tell(number + 1, len(tensors))
    return found


def probe(
    tensor: TensorSource, importance: Floats | None, usage: NDArray[np.float64] | None, encoding: Encoding, stored: GGMLType
) -> tuple[NDArray[np.uint8], float]:
    """The tensor as PROBE would give it back, in bytes of the type `stored`, and the noise-to-signal ratio of its output. Memory: the
    bytes, and some PIECE_WEIGHTS in float64."""
    kind, (n_row, n_col) = fit(TYPES[PROBE], tensor.shape[-1], "")[0], tensor.shape[-2:]
    step = max(1, PIECE_WEIGHTS // n_col)
    parts, noise, signal = [], 0.0, 0.0
    for matrix in range(prod(tensor.shape[:-2])):
        weight = None if importance is None else importance[matrix : matrix + 1]
        share = np.ones(1) if usage is None else usage[matrix : matrix + 1]
        for start in range(0, n_row, step):
            rows = tensor.rows(matrix * n_row + start, matrix * n_row + min(start + step, n_row))
            sample = Sample(tensor.name, tensor.type, rows[None], weight, share)
            values = encoded(sample, kind, encoding)
            lost, energy = energies(sample, values)
            noise, signal = noise + lost, signal + energy
            parts.append(as_stored(values, stored))
    return np.concatenate(parts), noise / signal if signal else 0.0


def capped_divergence(base: Sequence[BaseRows], blocks: Iterable[tuple[NDArray[np.float32], NDArray[np.int32]]]) -> float:
    """Mean over positions of the KL divergence, each at most CAP."""
    kl = np.concatenate([compare(logits, following, rows).kl for rows, (logits, following) in zip(base, blocks, strict=True)])
    return float(np.clip(kl, 0.0, CAP).mean())


def as_stored(values: Floats, kind: GGMLType) -> NDArray[np.uint8]:
    """float32 values as bytes of a float type. Raises BadInput for a type that is none."""
    if kind.name == "f32":
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if kind.name == "f16":
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    if kind.name == "bf16":
        bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    raise BadInput(f"sensitivity is measured on a model of f32, f16 or bf16 weights, not {kind.name}")


def from_table(names: Sequence[str], n_layer: int) -> Sensitivities:
    """Sensitivities of tensors from the shipped table.

    A kind's value there is the sum over all layers, so that each of n layers that have it gets an n-th, times a factor for its depth.
    """
    table = json.loads((files("a3b_quantize") / TABLE).read_text(encoding="utf-8"))
    kinds, depths = table["kinds"], table["depth"]
    counts: dict[str, int] = {}
    for name in names:
        counts[kind_of(name)] = counts.get(kind_of(name), 0) + 1
    values = {}
    for name in names:
        whole = kinds.get(kind_of(name), table["other"])
        at = by_layer(name, n_layer)
        factor = 1.0 if at is None else float(np.interp(at, np.linspace(0, 1, len(depths)), depths))
        values[name] = whole / counts[kind_of(name)] * factor
    return Sensitivities(values, False, "from the table measured on tiny-a3b and SmolLM2-135M")


def write_sensitivities(path: Path, found: Sensitivities) -> None:
    """As JSON, for the next budget."""
    keep_text(path, json.dumps(asdict(found), indent=1))


def read_sensitivities(path: Path) -> Sensitivities | None:
    """What `write_sensitivities` wrote; None when there is nothing, or nothing whole."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Sensitivities({str(k): float(v) for k, v in data["values"].items()}, bool(data["measured"]), str(data["how"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
