"""How much the predictions change when a tensor's output gets noisy, told by a calibration: no run of the model, whatever its size.

A block (attention, DeltaNet, routed experts, shared expert) adds y to the residual stream h. Noise in y of eps of its energy is
eps |y|^2 / |h|^2 of the stream's, and on SmolLM2-135M the KL divergence is that share times 0.5 to 1.0 by kind of tensor, within a factor
of 1.6 for most single ones (`estimate` in sensitivity.json; benchmarks/measure_sensitivity.py measures the constants). Noise in what a
block computes before its output projection goes on into y in the same proportion.

|y|^2 of a projection W over inputs of mean square w_j is the sum of W_ij^2 w_j: what the noise-to-signal ratios of
sampling_errors are relative to, so that an attention sink counts in both or in none. |h|^2 is that of usual tokens, from the median of the
measured ranges: where a sink or a super expert reaches far, the mean would hide the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import NORMAL_MEDIAN, Bounds
from a3b_gguf.roles import layer_of
from a3b_gguf.tensors import TensorSource
from a3b_quantize.sampling_errors import Floats, take_sample
from a3b_quantize.sensitivity import TABLE, Sensitivities, kind_of

OUTPUTS = ("attn_output", "ssm_out")  # what an attention or a DeltaNet layer adds to the stream
# The gate of a shared expert is a sigmoid: 0.5 when it knows nothing. Of k experts that share a token evenly each counts 1/k, and their
# outputs add up as independent ones do.
SHARED_GATE = 0.5
SAMPLE_WEIGHTS = 1 << 16

# importance [n_mat, cols] and usage [n_mat] of a tensor by name, as `take_sample` takes them
Weighting = Callable[[str], tuple[Floats | None, NDArray[np.float64] | None]]


@dataclass(frozen=True, slots=True)
class Stream:
    """Energies of the residual stream, by layer; usual_down: of what a down projection adds at usual tokens, by layer.

    embedding: before the first layer. Each is a sum over channels for one token.
    """

    after: Mapping[int, float]
    usual_down: Mapping[int, float]
    embedding: float


def estimated(tensors: Sequence[TensorSource], names: Sequence[str], weighting: Weighting, bounds: Bounds, n_used: int) -> Sensitivities:
    """Sensitivity of each of `names` that the ranges say enough about. tensors: of the model; n_used: experts that a token uses."""
    constants = json.loads((files("a3b_quantize") / TABLE).read_text(encoding="utf-8"))["estimate"]
    found = shares(tensors, names, weighting, bounds, n_used)
    values = {name: constants.get(constant_of(name), constants["other"]) * share for name, share in found.items()}
    return Sensitivities(values, False, f"estimated from the calibration on {bounds.header.tokens:,} tokens")


def constant_of(name: str) -> str:
    """Which constant a tensor goes by: experts by that of a dense layer."""
    return kind_of(name).removesuffix("_exps").removesuffix("_shexp")


def shares(tensors: Sequence[TensorSource], names: Sequence[str], weighting: Weighting, bounds: Bounds, n_used: int) -> dict[str, float]:
    """Of `names`: the energy that the tensor's block adds to the residual stream, as a share of the stream. As `estimated`."""
    found = {tensor.name: tensor for tensor in tensors}
    stream = _stream(found["token_embd.weight"], bounds)
    energies: dict[str, float | None] = {}

    def energy(name: str) -> float | None:
        if name not in energies:
            energies[name] = output_energy(found[name], *weighting(name)) if name in found else None
        return energies[name]

    every = {name: _share(name, stream, energy, n_used) for name in names}
    return {name: share for name, share in every.items() if share is not None}


def output_energy(tensor: TensorSource, importance: Floats | None, usage: NDArray[np.float64] | None) -> float | None:
    """Mean of |W x|^2 over tokens, inputs taken for independent; None without importance. Experts count by usage."""
    if importance is None:
        return None
    sample = take_sample(tensor, importance, usage, SAMPLE_WEIGHTS)
    assert sample.importance is not None
    mean_square = (sample.values.astype(np.float64) ** 2).mean(axis=1)  # over rows: [n_mat, cols]
    by_matrix = tensor.shape[-2] * (mean_square * sample.importance).sum(axis=1)
    return float((by_matrix * sample.usage).sum() / sample.usage.sum())


def _stream(embedding: TensorSource, bounds: Bounds) -> Stream:
    width = embedding.shape[-1]
    values = take_sample(embedding, None, None).values
    return Stream(
        {layer: width * _variance(each.p50) for layer, each in bounds.of("residual").items()},
        {layer: width * _variance(each.p50) for layer, each in bounds.of("down_out").items()},
        width * _variance(float(np.median(np.abs(values)))),
    )


def _variance(middle: float) -> float:
    """Of a normal distribution whose magnitudes have this median."""
    return (middle / NORMAL_MEDIAN) ** 2


def _share(name: str, stream: Stream, energy: Callable[[str], float | None], n_used: int) -> float | None:
    """The energy that the block of this tensor adds, as a share of the stream behind it. 1 outside the layers: there it is the stream."""
    layer, kind = layer_of(name), kind_of(name)
    if layer is None:
        return 1.0
    if not kind.startswith("ffn_"):
        before = stream.embedding if layer == 0 else stream.after.get(layer - 1)
        added = next((found for output in OUTPUTS if (found := energy(f"blk.{layer}.{output}.weight")) is not None), None)
        return None if before is None or added is None else added / (before + added)
    suffix = next((each for each in ("_exps", "_shexp") if kind.endswith(each)), "")
    added, behind, usual = energy(f"blk.{layer}.ffn_down{suffix}.weight"), stream.after.get(layer), stream.usual_down.get(layer)
    if added is None or not behind or usual is None:
        return None
    weight = {"_exps": 1 / max(n_used, 1), "_shexp": SHARED_GATE**2}.get(suffix, 1.0)
    return weight * (added if kind.startswith("ffn_down") else min(added, usual)) / behind
