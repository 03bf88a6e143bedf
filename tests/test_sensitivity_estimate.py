"""Sensitivity told by a calibration alone: shares of the residual stream."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.clip_bounds import Bounds, Header, Record
from a3b_gguf.errors import UsageError
from a3b_gguf.flows.calibrate import Options as CalibrateOptions
from a3b_gguf.flows.calibrate import calibrate_file
from a3b_gguf.flows.measure_sensitivity import sensitivities
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.flows.quantize_plan import open_source
from a3b_gguf.tensors import TYPES
from a3b_quantize.allocate import grouped
from a3b_quantize.policy import choose_policy
from a3b_quantize.sampling_errors import Sample
from a3b_quantize.sensitivity import kind_of
from a3b_quantize.sensitivity_estimate import estimated, output_energy

TEXT = files("a3b_quantize") / "sample.txt"


def test_the_energy_of_an_output_is_that_of_random_inputs() -> None:
    rng = np.random.default_rng(6)
    weights = rng.normal(0, 1, (2, 64, 256)).astype(np.float32)
    importance, usage = rng.exponential(1, (2, 256)).astype(np.float32), np.array([0.9, 0.1])
    weights[1] *= 3
    x = rng.normal(0, 1, (2, 256, 4000)) * np.sqrt(importance)[..., None]
    energies = ((weights @ x) ** 2).sum(axis=1).mean(axis=1)
    tensor = Sample("w", TYPES["f32"], weights, None, usage)
    assert output_energy(tensor, importance, usage) == pytest.approx((energies * usage).sum(), rel=0.03)
    assert output_energy(tensor, None, None) is None


def test_an_estimate_goes_by_shares_of_the_residual_stream() -> None:
    """One attention layer whose blocks add known energies to a stream of known energy; 4 experts, 2 used; a shared expert."""
    width, n = 64, np.random.default_rng(7)
    embedding = n.normal(0, 2, (500, width)).astype(np.float32)
    wide = {"attn_output": (width, 32), "attn_q": (32, width), "ffn_down_exps": (4, width, 32), "ffn_up_exps": (4, 32, width),
            "ffn_down_shexp": (width, 32)}  # fmt: skip
    tensors = [Sample("token_embd.weight", TYPES["f32"], embedding, None, np.ones(1))]
    tensors += [Sample(f"blk.0.{kind}.weight", TYPES["f32"], np.ones(shape, np.float32), None, np.ones(1)) for kind, shape in wide.items()]
    middle = 0.6745
    records = tuple(Record(0, site, -1, 1, 0, 99.0, p50 * middle, 1, 1, 1, 1.0) for site, p50 in (("residual", 3.0), ("down_out", 0.5)))
    bounds = Bounds(Header("m", "qwen35moe", "", "", 512, "text", "", {}), records)

    def weighting(name: str) -> tuple[np.ndarray, None]:
        shape = next(tensor.shape for tensor in tensors if tensor.name == name)
        return np.full((shape[0] if len(shape) == 3 else 1, shape[-1]), 0.5, np.float32), None

    names = [tensor.name for tensor in tensors] + ["blk.1.attn_q.weight"]
    found = estimated(tensors, names, weighting, bounds, 2).values
    constants = json.loads((files("a3b_quantize") / "sensitivity.json").read_text())["estimate"]
    added, stream = width * 32 * 0.5, width * 3.0**2  # of each projection; behind the layer
    attention = added / (added + width * 2.0**2)
    expected = {
        "token_embd": constants["token_embd"],
        "attn_output": constants["attn_output"] * attention,
        "attn_q": constants["attn_q"] * attention,
        "ffn_down_exps": constants["ffn_down"] * added / stream / 2,
        "ffn_up_exps": constants["ffn_up"] * width * 0.5**2 / stream / 2,  # of usual tokens, which is less
        "ffn_down_shexp": constants["ffn_down"] * added / stream / 4,
    }
    assert {kind_of(name): value for name, value in found.items()} == pytest.approx(expected, rel=0.03)


def test_a_large_model_is_estimated(tiny_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("a3b_gguf.flows.measure_sensitivity.AUTO_BYTES", 1000)
    with_ranges = calibrate_file(tiny_bf16, tmp_path / "c", CalibrateOptions((str(TEXT),), n_ctx=64, most_chunks=1, enough=0)).folder
    for calibration, how in ((with_ranges, "estimated from the calibration on 64 tokens"), (None, "from the table measured on")):
        options = Options(bounds=False, threads=1, type_name="iq4_nl", calibration=calibration)
        source = open_source(tiny_bf16, options, choose_policy(options.choice))
        groups = grouped(choose_policy(options.choice).assign(source.model, False).assignments)
        found = sensitivities(source, groups, options, "auto", (), lambda *at: None)
        assert found.how.startswith(how)
        assert all(found.of(each.name) for group in groups for each in group if "nextn" not in each.name)
    with pytest.raises(UsageError, match="needs --calibration DIR"):
        sensitivities(source, groups, options, "estimate", (), lambda *at: None)
