"""Encoding: importance by expert, shared scales, and the pipeline that runs ahead of the writer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.gguf_model import to_float32
from a3b_gguf.llama.ggml import quantize_chunk, validate
from a3b_gguf.tensors import TYPES, GGMLType, Model, n_rows
from a3b_quantize import pipeline
from a3b_quantize.assign import Assignment
from a3b_quantize.encode import KERNELS, Encoding, jobs
from a3b_quantize.kernels import EFFORTS
from a3b_quantize.kernels import KERNELS as FAST
from a3b_quantize.pipeline import CHUNK_WEIGHTS, Pipeline, Work, spans
from a3b_quantize.weighting import revived
from kernel_errors import distributions, importance_of, relative_error
from small_gguf import llama_metadata

Floats = NDArray[np.float32]
NAME = "blk.0.ffn_up_exps.weight"


class Held:
    """A TensorSource that lies in memory."""

    def __init__(self, values: Floats, name: str = NAME) -> None:
        self.name, self.shape, self.type, self._rows = name, values.shape, TYPES["f32"], values.reshape(-1, values.shape[-1])

    def rows(self, start: int, stop: int) -> Floats:
        return self._rows[start:stop]

    def raw(self, start: int, stop: int) -> bytes:
        return self._rows[start:stop].tobytes()


def encoded(values: Floats, kind: str, importance: Floats | None = None, encoding: Encoding | None = None, group_size: int = 32) -> bytes:
    model = Model(llama_metadata(), (Held(values),))
    assignment = Assignment(NAME, values.shape, TYPES["f32"], TYPES[kind], "expert_up", "asked for", group_size=group_size)
    given = None if importance is None else {NAME: importance}
    return b"".join(jobs(model, [assignment], encoding or Encoding(threads=2), given)[0].chunks())


def experts() -> tuple[Floats, Floats]:
    """5 experts of 300 x 1024, so that chunks of 1024 rows span them, and importance of each."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((5, 300, 1024)).astype(np.float32), np.stack([np.roll(importance_of(1024), 100 * i) for i in range(5)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_expert_is_encoded_with_its_own_importance(kernel: str) -> None:
    values, importance = experts()
    importance[3] = 0  # never seen: as if there were no importance
    encode = KERNELS[kernel](TYPES["q4_k"], 32, 2)
    expected = [encode(values[i], importance[i] if i != 3 else None).tobytes() for i in range(5)]
    assert encoded(values, "q4_k", importance, Encoding(kernel, threads=2)) == b"".join(expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_damaged_importance_is_refused_by_its_place(bad: float) -> None:
    values, importance = experts()
    importance[2, 77] = bad
    with pytest.raises(BadInput, match=rf"{NAME}, expert 2 of 5, column 77 is {bad}"):
        encoded(values, "iq4_nl", importance)


def test_importance_of_another_model_is_refused() -> None:
    values, importance = experts()
    with pytest.raises(BadInput, match=rf"{NAME} has shape \[4, 1024\], expected \[5, 1024\]"):
        encoded(values, "iq4_nl", importance[:4])
    with pytest.raises(BadInput, match=r"has shape \[5, 1023\]"):
        encoded(values, "iq4_nl", importance[:, 1:])


def test_huge_importance_is_no_damage() -> None:
    values, importance = experts()
    huge = np.where(importance > 0, np.float32(3e38), 0).astype(np.float32)
    assert len(encoded(values, "iq4_nl", huge)) == TYPES["iq4_nl"].nbytes(values.shape)


@pytest.mark.parametrize("name", ["iq4_nl", "iq4_xs", "q6_k"])
def test_ggmls_kernels_lose_no_block_whose_importance_is_zero(name: str) -> None:
    """ggml alone writes zeros there. Where no block is all zero the bytes are ggml's own."""
    rows, importance = distributions(4, 512)["gaussian"], importance_of(512)
    assert revived(TYPES[name], importance) is importance
    importance[64:96] = 0
    lost = to_float32(quantize_chunk(TYPES[name], rows, importance).data.cast("B"), TYPES[name]).reshape(rows.shape)
    kept = to_float32(KERNELS["ggml"](TYPES[name], 32, 1)(rows, importance).data.cast("B"), TYPES[name]).reshape(rows.shape)
    assert np.abs(lost[:, 64:96] - rows[:, 64:96]).mean() > 2 * np.abs(kept[:, 64:96] - rows[:, 64:96]).mean()


def test_effort_and_group_sizes_that_are_not_known_are_refused() -> None:
    values, _ = experts()
    with pytest.raises(UsageError, match="effort 4"):
        encoded(values, "iq4_nl", encoding=Encoding(effort=4))
    with pytest.raises(UsageError, match="no group size 96"):
        encoded(values, "iq4_nl", group_size=96)
    with pytest.raises(UsageError, match="blocks of q8_0 cannot share"):
        encoded(values, "q8_0", group_size=64)
    with pytest.raises(UsageError, match="not to ggml's"):
        encoded(values, "iq4_nl", encoding=Encoding("ggml"), group_size=64)


def scales_of(data: bytes, n_cols: int) -> NDArray[np.uint16]:
    """The scales of IQ4_NL as their bits, [rows, blocks]."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, n_cols // 32, 18)
    return np.ascontiguousarray(blocks[:, :, :2]).view(np.uint16)[:, :, 0]


@pytest.mark.parametrize("n_cols", [1024, 96, 224])
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
def test_the_blocks_of_a_group_share_their_scale(n_cols: int, group_size: int, weighted: bool) -> None:
    """Also where a row is no whole number of groups: the last is shorter, and never reaches into the next row."""
    values = np.random.default_rng(5).standard_normal((40, n_cols)).astype(np.float32)
    scales = scales_of(encoded(values, "iq4_nl", importance_of(n_cols)[None] if weighted else None, group_size=group_size), n_cols)
    step = group_size // 32
    for start in range(0, scales.shape[1], step):
        assert (scales[:, start : start + step] == scales[:, start : start + 1]).all()
        assert start == 0 or (scales[:, start] != scales[:, start - 1]).any()
    assert (scales[1:, 0] != scales[:-1, 0]).any()


def test_larger_groups_cost_what_they_must() -> None:
    """A legal file of the same size; on Gaussian weights about 20 % and 38 % more plain error (the best scale for each group)."""
    values = (np.random.default_rng(6).standard_normal((128, 2048)) * 0.02).astype(np.float32)
    files = [encoded(values, "iq4_nl", group_size=size) for size in (32, 64, 128)]
    assert len({len(data) for data in files}) == 1
    blocks = [np.frombuffer(data, np.uint8).reshape(128, -1) for data in files]
    assert all(validate(TYPES["iq4_nl"], data) for data in blocks)
    errors = [relative_error("iq4_nl", data, values, None, plain=True) for data in blocks]
    assert 1.17 < errors[1] / errors[0] < 1.25
    assert 1.33 < errors[2] / errors[0] < 1.43


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), size=st.sampled_from((32, 64, 128)), effort=st.sampled_from(EFFORTS), weighted=st.booleans())
def test_groups_lose_no_block(seed: int, size: int, effort: int, weighted: bool) -> None:
    """Blocks of like size, some of zeros: none that is not zero becomes zero."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((2, 256)).astype(np.float32) * rng.uniform(0.3, 3, (2, 8)).repeat(32, axis=1).astype(np.float32)
    rows *= (rng.random((2, 8)) < 0.8).repeat(32, axis=1)
    importance = rng.choice(np.array([0, 1e-30, 1, 1e30], np.float32), 256) if weighted else None
    out = to_float32(FAST["iq4_nl"](rows, importance, group_size=size, effort=effort).data.cast("B"), TYPES["iq4_nl"]).reshape(-1, 32)
    assert np.isfinite(out).all()
    assert all(block.any() for block, source in zip(out, rows.reshape(-1, 32), strict=True) if source.any())


class Pending(Future[bytes]):
    """Whoever waits for it fails instead."""

    def result(self, timeout: float | None = None) -> bytes:
        assert self.done(), "waited for a chunk that is not the first"
        return super().result(timeout)


class FirstOnly:
    """A pool that finishes what it was given first and nothing else."""

    def __init__(self) -> None:
        self.futures: list[Future[bytes]] = []

    def submit(self, function: Callable[[int, int], bytes], start: int, stop: int) -> Future[bytes]:
        future = Pending()
        if not self.futures:
            future.set_result(function(start, stop))
        self.futures.append(future)
        return future

    def shutdown(self, cancel_futures: bool) -> None:
        assert cancel_futures
        for future in self.futures[1:]:
            future.cancel()


def number(start: int, stop: int) -> bytes:
    return bytes([start // 1024])


def test_no_chunk_is_read_too_early_or_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FirstOnly()
    monkeypatch.setattr(pipeline, "ThreadPoolExecutor", lambda *_, **__: pool)
    chunks = Pipeline([Work(number, (64 * 1024, 1024))], 2).chunks(0)
    assert next(chunks) == b"\0"
    assert len(pool.futures) == 4
    chunks.close()  # type: ignore[attr-defined]
    assert all(future.cancelled() for future in pool.futures[1:])


def test_the_next_tensor_is_begun_before_the_last_chunk_is_written() -> None:
    begun = threading.Event()

    def announced(start: int, stop: int) -> bytes:
        begun.set()
        return b"next"

    line = Pipeline([Work(number, (1024, 1024)), Work(announced, (1024, 1024))], 2)
    chunks = line.chunks(0)
    assert next(chunks) == b"\0"
    assert begun.wait(10)  # while the writer still holds the only chunk of the first
    assert list(chunks) == []
    assert list(line.chunks(1)) == [b"next"]


def test_tensors_may_be_left_out_and_asked_for_again() -> None:
    """What a resumed run does; what was encoded ahead is dropped."""
    line = Pipeline([Work(lambda start, stop, i=i: bytes([i]), (3 * 1024, 1024)) for i in range(5)], 2)  # type: ignore[misc]
    for i in (1, 2, 4, 0, 1, 4, 4):
        assert b"".join(line.chunks(i)) == bytes([i] * 3)
    line.stop()


def test_spans_cover_every_row_once() -> None:
    for shape in ((7,), (1, 7), (3, 5, 1 << 19), (10, 1 << 21), (5000, 1000)):
        found = spans(shape)
        assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
        assert found[-1][1] == n_rows(shape)
        assert all((stop - start) * shape[-1] <= max(CHUNK_WEIGHTS, shape[-1]) for start, stop in found)


def test_results_come_in_order_and_errors_come_out() -> None:
    gate = threading.Event()

    def work(start: int, stop: int) -> bytes:
        if start == 0:
            gate.wait(10)  # the first is done last
        gate.set()
        if start == 7 * 1024:
            raise BadInput("seven")
        return number(start, stop)

    assert b"".join(Pipeline([Work(work, (6 * 1024, 1024))], 3).chunks(0)) == bytes(range(6))
    with pytest.raises(BadInput, match="seven"):
        list(Pipeline([Work(work, (9 * 1024, 1024))], 3).chunks(0))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bytes_do_not_depend_on_threads(threads: int) -> None:
    values, importance = experts()
    assert encoded(values, "iq4_xs", importance, Encoding(threads=threads)) == encoded(values, "iq4_xs", importance, Encoding(threads=2))


def test_a_type_without_a_fast_kernel_takes_importance_too() -> None:
    values, importance = experts()
    kind: GGMLType = TYPES["iq3_s"]
    expected = [quantize_chunk(kind, values[i, :20], importance[i]).tobytes() for i in range(5)]
    assert encoded(np.ascontiguousarray(values[:, :20]), "iq3_s", importance) == b"".join(expected)
