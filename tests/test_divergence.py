"""The arithmetic behind a3b eval: distributions against a plain computation, the file of a base, intervals that hold what they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_gguf.errors import BadInput
from a3b_quantize.base_logits import Key, Writer, check, pack, unpack
from a3b_quantize.divergence import BaseRows, base_rows, compare, joined, log_sums, negative_log_p
from a3b_quantize.estimates import Estimate, exp_mean, maximum, mean, quantile, root_mean_square

KEY = Key(base="b", tokens="t", n_ctx=16, n_chunk=2, n_vocab=50, n_expert_used=0)


def logits_of(seed: int, n: int = 7, n_vocab: int = 50, spread: float = 6.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (n, n_vocab)).astype(np.float32)


def test_divergence_equals_a_plain_computation() -> None:
    base, ours, following = logits_of(1), logits_of(2), np.arange(7, dtype=np.int32)
    found = compare(ours, following, base_rows(base, following))
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True) for x in (base, ours))
    counted = np.log(p) > -16
    expected = np.where(counted, p * np.log(p / q), 0).sum(axis=1)
    assert found.kl == pytest.approx(expected, rel=1e-5)
    assert not counted.all()
    rows = np.arange(7)
    assert found.nll == pytest.approx(-np.log(q[rows, following]), rel=1e-5)
    assert found.base_nll == pytest.approx(-np.log(p[rows, following]), rel=1e-5)
    assert found.p_change == pytest.approx(q[rows, following] - p[rows, following], abs=1e-6)
    assert found.same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    assert negative_log_p(ours, following) == pytest.approx(found.nll)


def test_large_logits_do_not_overflow() -> None:
    assert log_sums(np.array([[1000.0, 999.0], [-1000.0, -1001.0]], np.float32)) == pytest.approx([1000.3132617, -999.6867383])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 9), n_vocab=st.integers(2, 400), spread=st.sampled_from([0.0, 0.5, 8.0, 40.0]))
def test_a_packed_chunk_comes_back(seed: int, n: int, n_vocab: int, spread: float) -> None:
    rows = base_rows(logits_of(seed, n, n_vocab, spread), np.zeros(n, np.int32))
    back = unpack(pack(rows))
    for name in ("nll", "top", "counts", "tokens"):
        assert np.array_equal(getattr(rows, name), getattr(back, name)), name
    assert np.all(np.abs(back.log_p - rows.log_p) <= np.abs(rows.log_p) * 2.0**-16)


def test_a_part_of_rows_is_those_rows() -> None:
    logits, following = logits_of(3, 10), np.zeros(10, np.int32)
    whole = base_rows(logits, following)
    parts = joined([whole.part(0, 4), whole.part(4, 4), whole.part(4, 10)])
    assert isinstance(parts, BaseRows)
    assert np.array_equal(parts.tokens, whole.tokens)
    assert np.array_equal(whole.part(4, 10).log_p, base_rows(logits[4:], following[4:]).log_p)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    with Writer(path, KEY) as writer:
        for seed in range(2):
            writer.add(base_rows(logits_of(seed), np.zeros(7, np.int32)))
        writer.finish()
    return path


def test_a_file_of_another_key_is_refused(written: Path) -> None:
    check(written, KEY)
    other = Key(base="b", tokens="u", n_ctx=16, n_chunk=2, n_vocab=50, n_expert_used=0)
    with pytest.raises(BadInput, match="computed from something else: tokens differ"):
        check(written, other)


def test_every_damaged_byte_is_noticed(written: Path) -> None:
    whole = written.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 120)):
        written.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with pytest.raises(BadInput):
            check(written, KEY)
    for cut in (0, 5, 40, len(whole) - 1):
        written.write_bytes(whole[:cut])
        with pytest.raises(BadInput):
            check(written, KEY)
    written.write_bytes(whole + b"x")
    with pytest.raises(BadInput, match="behind the last chunk"):
        check(written, KEY)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with Writer(tmp_path / "base", KEY) as writer:
            writer.add(base_rows(logits_of(0), np.zeros(7, np.int32)))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_intervals_of_means_hold_the_truth_as_often_as_they_say() -> None:
    """Positions of one chunk share half of their noise: an interval that took them for independent would hold the truth half as often."""
    rng, held, naive, runs = np.random.default_rng(5), 0, 0, 400
    for _ in range(runs):
        values = 3.0 + rng.normal(0, 1, (10, 1)) + rng.normal(0, 1, (10, 40))
        found = mean(values)
        held += found.low <= 3.0 <= found.high
        naive += abs(found.value - 3.0) <= 1.96 * (found.stderr or 0)
    assert 0.92 <= held / runs <= 0.98
    assert naive / runs < 0.6


def test_estimates_of_small_things() -> None:
    values = np.array([[1.0, 2.0], [3.0, 6.0]])
    assert mean(values).value == 3.0
    assert mean(values, 100).value == 300.0
    assert exp_mean(np.zeros((2, 2))) == Estimate(1.0, 0.0, 1.0, 1.0)
    assert root_mean_square(values).value == pytest.approx(np.sqrt(12.5))
    assert root_mean_square(np.zeros((2, 2))).value == 0.0
    assert quantile(values, 0.5).value == 2.5
    assert quantile(values, 0.999).value == pytest.approx(5.991)
    assert maximum(values).value == 6.0


def test_intervals_of_quantiles_hold_the_truth() -> None:
    rng, held = np.random.default_rng(6), 0
    for _ in range(300):
        found = quantile(rng.exponential(1, (4, 250)), 0.99)
        held += found.low <= -np.log(0.01) <= found.high
    assert held >= 0.93 * 300
