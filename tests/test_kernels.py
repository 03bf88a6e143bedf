"""The fast kernels against ggml's: error, layout, and that no block is ever lost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput
from a3b_gguf.flows.quantize import Options, quantize_file
from a3b_gguf.gguf_model import to_float32
from a3b_gguf.llama.ggml import quantize_chunk, validate
from a3b_gguf.llama.symbols import ggml_function
from a3b_gguf.tensors import TYPES
from a3b_quantize import kernels
from a3b_quantize.kernels import EFFORTS, KERNELS, make_ready
from a3b_quantize.kernels.compiled import compiled
from kernel_errors import distributions, importance_of, relative_error
from small_gguf import write_arrays

Floats = NDArray[np.float32]
NAMES = tuple(KERNELS)


def decoded(name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> Floats:
    return to_float32(data.data.cast("B"), TYPES[name]).reshape(shape)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", NAMES)
def test_error_is_at_most_ggmls(name: str, weighted: bool) -> None:
    for title, rows in distributions(24, 1024).items():
        importance = importance_of(rows.shape[1]) if weighted else None
        theirs = relative_error(name, quantize_chunk(TYPES[name], rows, importance), rows, importance)
        for effort in EFFORTS:
            ours = relative_error(name, KERNELS[name](rows, importance, effort=effort), rows, importance)
            assert ours <= theirs * (1 + 1e-6), (title, effort, ours, theirs)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("q8_0", "mxfp4")])
def test_effort_pays(name: str, weighted: bool) -> None:
    rng = np.random.default_rng(1)
    for values in (rng.standard_normal((48, 1024)), rng.standard_t(5, (48, 1024))):
        rows, importance = (values * 0.02).astype(np.float32), importance_of(1024) if weighted else None
        errors = [relative_error(name, KERNELS[name](rows, importance, effort=effort), rows, importance) for effort in EFFORTS]
        assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("name", NAMES)
def test_small_weights_cost_little(name: str) -> None:
    """Where scales are subnormal float16, ggml loses up to everything. Ours are settled for the least error."""
    rows = distributions(8, 1024)
    usual = relative_error(name, quantize_chunk(TYPES[name], rows["gaussian"]), rows["gaussian"], None)
    assert relative_error(name, KERNELS[name](rows["x 1e-5"]), rows["x 1e-5"], None) < 2 * usual


@pytest.mark.parametrize("name", ["iq4_nl", "iq4_xs", "q4_0", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_constant_blocks_use_the_freedom_of_scales(name: str) -> None:
    """Only the rounding of scales errs there, and there is more than one way to write the same value."""
    rows = distributions(24, 1024)["constant"]
    ours, theirs = (relative_error(name, data, rows, None) for data in encoded_by_both(name, rows, None))
    assert ours < 0.8 * theirs


@pytest.mark.parametrize("name", NAMES)
def test_unimportant_weights_among_important_zeros_do_not_vanish(name: str) -> None:
    rows, importance = np.zeros((1, 256), np.float32), np.ones(256, np.float32)
    rows[0, 5::32], importance[5::32] = 0.001, 0
    out = decoded(name, KERNELS[name](rows, importance), rows.shape)
    assert (out[0, 5 :: TYPES[name].block] != 0).all()


def encoded_by_both(name: str, rows: Floats, importance: Floats | None) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return KERNELS[name](rows, importance), quantize_chunk(TYPES[name], rows, importance)


@pytest.mark.parametrize("name", NAMES)
def test_ggml_reads_what_gguf_py_reads(name: str) -> None:
    """The layout: two decoders that we did not write agree, and what they read is near the source."""
    rows = distributions(8, 512)["gaussian"]
    data = KERNELS[name](rows, None)
    assert validate(TYPES[name], data)
    ours = decoded(name, data, rows.shape)
    np.testing.assert_allclose(ggml_to_float(name, data, rows.size).reshape(rows.shape), ours, rtol=1e-6)
    assert np.abs(ours - rows).max() < 0.3 * np.abs(rows).max()
    assert np.corrcoef(ours.ravel(), rows.ravel())[0, 1] > (0.97 if name == "q3_k" else 0.99)


class Traits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def ggml_to_float(name: str, data: NDArray[np.uint8], n: int) -> Floats:
    traits = ggml_function("ggml_get_type_traits", ctypes.POINTER(Traits), [ctypes.c_int])(TYPES[name].number).contents
    assert traits.block_bytes == TYPES[name].block_bytes
    out = np.empty(n, np.float32)
    traits.to_float(data.ctypes.data, out.ctypes.data, n)
    return out


def blocks(low: float, high: float) -> st.SearchStrategy[Floats]:
    """256 weights: zeros and finite values of magnitudes low..high, of either sign."""
    positive = st.floats(low, high, width=32)
    return arrays(np.float32, (1, 256), elements=st.one_of(st.just(0.0), positive, positive.map(lambda x: -x)))


def weights() -> st.SearchStrategy[Floats]:
    return arrays(np.float32, 256, elements=st.one_of(st.just(0.0), st.floats(0, float(np.float32(1e38)), width=32)))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(rows=blocks(2.0**-9, 1024), importance=st.none() | weights(), effort=st.sampled_from(EFFORTS))
def test_no_block_is_lost(name: str, rows: Floats, importance: Floats | None, effort: int) -> None:
    data = KERNELS[name](rows, importance, effort=effort)
    kind = TYPES[name]
    assert validate(kind, data)
    out = decoded(name, data, rows.shape)
    assert np.isfinite(out).all()
    assert float(np.abs(out).max()) <= 2 * float(np.abs(rows).max())
    for start in range(0, 256, kind.block):
        part = slice(start, start + kind.block)
        assert out[0, part].any() == rows[0, part].any()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(rows=blocks(float(np.float32(1e-45)), float(np.float32(3e38))), importance=st.none() | weights(), effort=st.sampled_from(EFFORTS))
def test_any_finite_weights_are_encoded_or_refused(name: str, rows: Floats, importance: Floats | None, effort: int) -> None:
    """Down to the least denormal and up to the largest float: a scale that does not fit is infinite, which validation finds."""
    data = KERNELS[name](rows, importance, effort=effort)
    out = decoded(name, data, rows.shape) if validate(TYPES[name], data) else None
    if np.abs(rows).max() < 60000:
        assert out is not None
    if out is not None:
        assert np.isfinite(out).all()
        assert float(np.abs(out).max()) <= 2 * float(np.abs(rows).max()) + 1e-6


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mxfp4"])
def test_weights_beyond_float16_are_found(name: str) -> None:
    rows = np.ones((4, 256), np.float32)
    rows[2] = 1e30
    data = KERNELS[name](rows)
    assert [validate(TYPES[name], data[i : i + 1]) for i in range(4)] == [True, True, False, True]


def test_a_value_that_does_not_fit_is_refused_by_its_place(tmp_path: Path) -> None:
    values = np.ones((40, 256), np.float32)
    values[33] = 1e30
    source = write_arrays(tmp_path / "wide.gguf", {"blk.0.attn_q.weight": values})
    with pytest.raises(BadInput, match=r"row 33: q\d_\w cannot hold its values, the largest is 1e\+30"):
        quantize_file(source, tmp_path / "out.gguf", Options("q6_k", kernel="fast", bounds=False))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_bad_importance_is_refused(name: str, bad: float) -> None:
    importance = np.ones(256, np.float32)
    importance[7] = bad
    with pytest.raises(BadInput, match="column 7"):
        KERNELS[name](np.ones((1, 256), np.float32), importance)
    with pytest.raises(BadInput, match="has shape"):
        KERNELS[name](np.ones((1, 256), np.float32), np.ones(255, np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
def test_a_row_does_not_depend_on_its_neighbours(name: str, weighted: bool) -> None:
    """So the bytes depend neither on threads nor on how rows are cut into chunks; after other work in between, too."""
    rows = np.concatenate([part[:3] for part in distributions(4, 512).values() if np.abs(part).max() < 1e4])
    importance = importance_of(512) if weighted else None
    together = KERNELS[name](rows, importance)
    alone = [KERNELS[name](row[None], importance) for row in reversed(rows)]
    assert np.array_equal(together, np.concatenate(alone[::-1]))


def test_read_only_rows_are_taken() -> None:
    rows = np.ones((2, 256), np.float32)
    expected = KERNELS["q8_0"](rows)
    rows.flags.writeable = False
    assert np.array_equal(KERNELS["q8_0"](rows), expected)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(BadInput, match="whole number of q6_k blocks"):
        KERNELS["q6_k"](np.ones((1, 128), np.float32))


def test_numba_is_imported_only_when_a_kernel_runs() -> None:
    code = "import sys, a3b_gguf.cli.quantize, a3b_gguf.flows.quantize, a3b_quantize.kernels; sys.exit('numba' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", code), check=False).returncode == 0


def test_compiling_is_said_once(tmp_path: Path) -> None:
    code = "from a3b_quantize.kernels import make_ready; make_ready(['f32', 'q8_0'], print)"
    runs = [
        subprocess.run(
            (sys.executable, "-c", code), capture_output=True, text=True, check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        ).stdout
        for _ in range(2)
    ]
    assert runs == ["compiling kernels, once: q8_0\n", ""]


def test_types_without_a_kernel_need_nothing() -> None:
    said: list[str] = []
    make_ready(["f32", "q5_0"], said.append)
    assert said == []


def test_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(lambda x: x + 1)(1) == 2


def test_what_was_compiled_before_a_source_changed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba would: it looks at a kernel's own file, and the kernels inline parts of others."""
    kernel = types.SimpleNamespace(stats=types.SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setattr(kernels, "_compiled", lambda module, name: kernel)
    old, new, other = (tmp_path / f"{name}.nbi" for name in ("linear.q8_0-1", "linear.q8_0-2", "linear.q4_0-1"))
    for file, seconds in ((old, 1.0), (new, 4e9), (other, 1.0)):
        file.write_bytes(b"")
        os.utime(file, (seconds, seconds))
    kernels._discard_stale("linear", "q8_0")
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)
