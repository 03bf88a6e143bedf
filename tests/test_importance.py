"""Importance of a matrix from sums and counts: drawn toward a prior where few tokens were seen, above zero, and plain on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from a3b_gguf.gguf_model import open_gguf_model, to_float32
from a3b_gguf.tensors import TYPES
from a3b_quantize.imatrix import Imatrix, ImatrixEntry
from a3b_quantize.importance import ImportanceOptions, importance_of, plain_importance, steady_importance
from a3b_quantize.kernels import KERNELS
from small_gguf import write_arrays

OPTIONS = ImportanceOptions(shared_prior=16, own_prior=4, floor=1e-3)


def entry(sums: list[list[float]], counts: list[float]) -> ImatrixEntry:
    return ImatrixEntry(np.array(sums, np.float32), np.array(counts, np.float32))


def test_gate_and_up_lean_on_their_layer() -> None:
    seen = entry([[100, 300, 0], [8, 0, 0], [0, 0, 0]], [100, 4, 0])
    found = steady_importance(seen, "expert_gate", OPTIONS)
    pooled = np.array([108, 300, 0]) / 104
    np.testing.assert_allclose(found[0, :2], (np.array([100, 300]) + 16 * pooled[:2]) / 116, rtol=1e-6)
    np.testing.assert_allclose(found[1, :2], (np.array([8, 0]) + 16 * pooled[:2]) / 20, rtol=1e-6)
    np.testing.assert_allclose(found[2, :2], pooled[:2], rtol=1e-6)
    np.testing.assert_allclose(found[:, 2], 1e-3 * found.mean(axis=1), rtol=2e-3)  # the channel that nobody used


def test_down_leans_on_its_own_mean() -> None:
    seen = entry([[100, 300], [8, 0], [0, 0]], [100, 4, 0])
    found = steady_importance(seen, "expert_down", OPTIONS)
    np.testing.assert_allclose(found[1], (np.array([8, 0]) + 4 * 1) / 8, rtol=1e-6)
    assert found[2, 0] == found[2, 1] > 0


def test_other_tensors_are_only_kept_above_zero() -> None:
    found = steady_importance(entry([[10, 0, 30]], [10]), "attention", OPTIONS)
    np.testing.assert_allclose(found, [[1, 1e-3 * 4 / 3, 3]], rtol=1e-6)
    assert steady_importance(entry([[0, 0, 0]], [10]), "attention", OPTIONS).tolist() == [[1, 1, 1]]


def test_many_tokens_speak_for_themselves() -> None:
    rng = np.random.default_rng(0)
    counts = np.full(4, 1e6, np.float32)
    seen = ImatrixEntry((rng.random((4, 64)) * 1e6 + 1e4).astype(np.float32), counts)
    for role in ("expert_gate", "expert_down"):
        np.testing.assert_allclose(steady_importance(seen, role, OPTIONS), plain_importance(seen), rtol=2e-3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["expert_gate", "expert_down", "attention"]))
def test_it_is_always_finite_and_above_zero(seed: int, role: str) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.choice([0, 1, 5, 1e6], 6).astype(np.float32)
    sums = (10.0 ** rng.uniform(-30, 30, (6, 32)) * rng.integers(0, 2, (6, 32)) * (counts > 0)[:, None]).astype(np.float32)
    found = steady_importance(ImatrixEntry(sums, counts), role, OPTIONS)
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_an_imatrix_of_the_whole_model(tmp_path: Path) -> None:
    """By tensor, and plain where that is asked for or where counts by expert are unknown."""
    arrays = {
        "blk.0.ffn_gate_exps.weight": np.ones((2, 4, 32), np.float32), "blk.0.attn_q.weight": np.ones((4, 32), np.float32)
    }  # fmt: skip
    model = open_gguf_model(write_arrays(tmp_path / "m.gguf", arrays))
    sums = np.concatenate([np.full((1, 32), 50.0), np.full((1, 32), 0.0)]).astype(np.float32)
    experts, query = ImatrixEntry(sums, np.array([10, 0], np.float32)), ImatrixEntry(sums[:1], np.array([10], np.float32))
    imatrix = Imatrix({"blk.0.ffn_gate_exps.weight": experts, "blk.0.attn_q.weight": query}, 512, 1, ())
    found = importance_of(imatrix, model, ImportanceOptions())
    assert found["blk.0.ffn_gate_exps.weight"].tolist() == [[5.0] * 32] * 2
    plain = importance_of(imatrix, model, ImportanceOptions(plain=True))
    assert plain["blk.0.ffn_gate_exps.weight"].tolist() == [[5.0] * 32, [1.0] * 32]
    assert found["blk.0.attn_q.weight"].tolist() == plain["blk.0.attn_q.weight"].tolist() == [[5.0] * 32]
    legacy = Imatrix({"blk.0.attn_q.weight": query}, 0, 1, (), is_legacy=True)
    assert importance_of(legacy, model, ImportanceOptions())["blk.0.attn_q.weight"].tolist() == [[5.0] * 32]


def error(weights: NDArray[np.float32], importance: NDArray[np.float32] | None, true: NDArray[np.float32]) -> float:
    stored = to_float32(KERNELS["iq4_nl"](weights, importance).tobytes(), TYPES["iq4_nl"]).reshape(weights.shape)
    return float((true * (stored - weights) ** 2).sum() / (true * weights**2).sum())


@pytest.mark.parametrize("role", ["expert_gate", "expert_down"])
def test_what_shrinking_is_for(role: str) -> None:
    """An expert that saw two tokens: with plain importance its error is worse than with none, shrunk it is better than both."""
    rng = np.random.default_rng(3)
    true = rng.lognormal(0, 1, 512).astype(np.float32)
    weights = rng.standard_normal((96, 512)).astype(np.float32)
    tokens = (rng.standard_normal((2000, 512)) ** 2 * true).astype(np.float32)
    seen = ImatrixEntry(np.stack([tokens.sum(axis=0), tokens[:2].sum(axis=0)]), np.array([2000, 2], np.float32))
    plain, none = error(weights, plain_importance(seen)[1], true), error(weights, None, true)
    steady = error(weights, steady_importance(seen, role, ImportanceOptions())[1], true)
    assert steady < 0.97 * min(plain, none)
