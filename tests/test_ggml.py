"""The door to ggml: our table of types, its kernels, and the layout of its tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest

from a3b_gguf.errors import BadInput, MachineLacks, UsageError
from a3b_gguf.llama.ggml import NOT_WRITABLE, WRITABLE, quantize_chunk, requires_importance, validate
from a3b_gguf.llama.symbols import ggml_function
from a3b_gguf.llama.watch import GGMLTensor, Node, Reader
from a3b_gguf.tensors import TYPES, GGMLType

# gguf-py 0.19 gives Q8_1 a scale and a sum of 4 bytes each, which ggml stores in 2, and does not know Q2_0.
GGUF_PY_DIFFERS = ("q8_1", "q2_0")
COUNT = 43  # GGML_TYPE_COUNT
# Their first use builds tables for seconds, and without an importance matrix no command reaches them.
SLOW = ("iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")
EACH_WRITABLE = [pytest.param(kind, id=kind.name, marks=[pytest.mark.prove] * (kind.name in SLOW)) for kind in WRITABLE]


class TypeTraits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p), ("blck_size", ctypes.c_int64), ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )  # fmt: skip


def decode(kind: GGMLType, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """ggml's own dequantization, which knows every type."""
    if kind.name == "f32":
        return data.view(np.float32).reshape(shape)
    traits = ggml_function("ggml_get_type_traits", ctypes.POINTER(TypeTraits), [ctypes.c_int])(kind.number).contents
    out = np.empty(shape, np.float32)
    traits.to_float(data.ctypes.data, out.ctypes.data, out.size)
    return out


def rows(n: int = 6, n_cols: int = 512, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_cols)).astype(np.float32)


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_our_table_is_ggmls(kind: GGMLType) -> None:
    name = ggml_function("ggml_type_name", ctypes.c_char_p, [ctypes.c_int])(kind.number)
    size = ggml_function("ggml_type_size", ctypes.c_size_t, [ctypes.c_int])(kind.number)
    block = ggml_function("ggml_blck_size", ctypes.c_int64, [ctypes.c_int])(kind.number)
    assert (name.decode().lower(), block, size) == (kind.name, kind.block, kind.block_bytes)
    if kind.name not in GGUF_PY_DIFFERS:
        theirs = gguf.GGMLQuantizationType(kind.number)
        assert (theirs.name.lower(), gguf.GGML_QUANT_SIZES[theirs]) == (kind.name, (kind.block, kind.block_bytes))


def test_our_table_is_whole() -> None:
    assert {kind.number for kind in TYPES.values()} >= {int(kind) for kind in gguf.GGMLQuantizationType}
    name = ggml_function("ggml_type_name", ctypes.c_char_p, [ctypes.c_int])
    known = {
        number
        for number in range(COUNT)
        if name(number) and b"deprecated" not in name(number).lower() and b"removed" not in name(number).lower()
    }
    assert {kind.number for kind in TYPES.values()} == known


@pytest.mark.parametrize("kind", EACH_WRITABLE)
def test_what_is_encoded_decodes_to_what_it_was(kind: GGMLType) -> None:
    values = rows()
    importance = np.ones(values.shape[1], np.float32)
    data = quantize_chunk(kind, values, importance)
    assert data.shape == (len(values), kind.row_bytes(values.shape[1]))
    assert validate(kind, data)
    error = float(((decode(kind, data, values.shape) - values) ** 2).mean() / (values**2).mean())
    # b bits for a Gaussian leave about 4^-b of its energy at best; bf16 has 8 bits of precision, f16 has 11.
    bits = {"f32": 16.0, "f16": 11.0, "bf16": 8.0}.get(kind.name, kind.bits_per_weight)
    assert error < 12 * 4.0**-bits, error


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16", "tq1_0", "tq2_0"])
def test_bytes_of_gguf_pys_own_quantizers(name: str) -> None:
    kind = TYPES[name]
    np.testing.assert_array_equal(
        quantize_chunk(kind, rows()), gguf.quantize(rows(), gguf.GGMLQuantizationType(kind.number)).view(np.uint8).reshape(6, -1)
    )


def test_importance_is_used() -> None:
    values, importance = rows(), np.ones(512, np.float32)
    importance[:16] = 1e4
    plain, weighted = quantize_chunk(TYPES["iq4_nl"], values), quantize_chunk(TYPES["iq4_nl"], values, importance)

    def error(data: np.ndarray) -> float:
        decoded = gguf.dequantize(data, gguf.GGMLQuantizationType.IQ4_NL)
        return float((((decoded - values) ** 2)[:, :16]).mean())

    assert error(weighted) < error(plain)


def test_threads_do_not_disturb_each_other() -> None:
    """The iq types build tables on their first use; all threads must see them whole."""
    kinds = [TYPES[name] for name in ("iq3_xxs", "iq3_s", "q4_k", "iq4_nl")] * 4
    importance = np.ones(512, np.float32)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda kind: quantize_chunk(kind, rows(2), importance).tobytes(), kinds))
    assert together == [quantize_chunk(kind, rows(2), importance).tobytes() for kind in kinds]


def test_views_are_encoded_as_they_look() -> None:
    wide = rows(6, 1024)
    np.testing.assert_array_equal(quantize_chunk(TYPES["q8_0"], wide[:, ::2]), quantize_chunk(TYPES["q8_0"], wide[:, ::2].copy()))
    assert quantize_chunk(TYPES["q8_0"], wide[:0]).shape == (0, 1088)


def test_what_cannot_be_encoded_is_refused() -> None:
    for name in NOT_WRITABLE:
        with pytest.raises(UsageError, match="cannot write"):
            quantize_chunk(TYPES[name], rows())
    with pytest.raises(BadInput, match="not a whole number"):
        quantize_chunk(TYPES["q4_k"], rows(n_cols=320))
    with pytest.raises(BadInput, match="512 columns"):
        quantize_chunk(TYPES["q4_k"], rows(), np.ones(511, np.float32))
    with pytest.raises(TypeError, match="float64"):
        quantize_chunk(TYPES["q4_k"], rows().astype(np.float64))
    needy = [kind.name for kind in WRITABLE if requires_importance(kind)]
    assert needy == ["iq2_xxs", "iq2_xs", "iq1_s"]
    for name in needy:  # ggml itself would abort the process
        with pytest.raises(UsageError, match="importance matrix"):
            quantize_chunk(TYPES[name], rows())


def test_an_overflowing_scale_is_seen() -> None:
    assert not validate(TYPES["q8_0"], quantize_chunk(TYPES["q8_0"], np.full((1, 32), 1e30, np.float32)))


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(MachineLacks, match="ggml_no_such_function"):
        ggml_function("ggml_no_such_function", None, [])


def test_functions_do_not_share_their_types() -> None:
    first = ggml_function("ggml_type_name", ctypes.c_char_p, [ctypes.c_int])
    ggml_function("ggml_type_name", ctypes.c_void_p, [])
    assert first(8) == b"q8_0"


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@pytest.fixture
def arena() -> Iterator[int]:
    context = ggml_function("ggml_init", ctypes.c_void_p, [InitParams])(InitParams(1 << 16, None, False))
    yield context
    ggml_function("ggml_free", None, [ctypes.c_void_p])(context)


def test_layout_of_ggml_tensor(arena: int) -> None:
    """Our struct against ggml's own functions: every field that `watch` reads, and the size of the whole."""
    pointer, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    address = ggml_function("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, i64, i64, i64])(arena, 8, 64, 3, 5)
    ggml_function("ggml_set_name", pointer, [pointer, ctypes.c_char_p])(address, b"ffn_moe_down-7")
    tensor = GGMLTensor.from_address(address)
    assert (tensor.type, tuple(tensor.ne), tensor.name) == (8, (64, 3, 5, 1), b"ffn_moe_down-7")
    assert tuple(tensor.nb) == (34, 68, 204, 1020)
    assert tensor.name == ggml_function("ggml_get_name", ctypes.c_char_p, [pointer])(address)
    assert tensor.nb[3] == ggml_function("ggml_nbytes", size, [pointer])(address)
    assert tensor.data == ggml_function("ggml_get_data", pointer, [pointer])(address)
    view = ggml_function("ggml_view_1d", pointer, [pointer, pointer, i64, size])(arena, address, 32, 68)
    seen = GGMLTensor.from_address(view)
    assert (seen.view_src, seen.view_offs, seen.src[0], seen.data) == (address, 68, address, tensor.data + 68)
    product = ggml_function("ggml_mul_mat", pointer, [pointer, pointer, pointer])
    columns = ggml_function("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, i64, i64])
    node = Node(product(arena, columns(arena, 0, 64, 7), columns(arena, 0, 64, 2)), Reader())
    assert (node.op, node.shape, node.source(0).shape, node.source(1).shape) == ("MUL_MAT", (1, 1, 2, 7), (1, 1, 7, 64), (1, 1, 2, 64))
    object_header = 32  # sizeof(struct ggml_object)
    assert ctypes.sizeof(GGMLTensor) == ggml_function("ggml_tensor_overhead", size, [])() - object_header


def test_tensors_of_other_types_are_not_read(arena: int) -> None:
    new = ggml_function("ggml_new_tensor_1d", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64])
    node = Node(new(arena, TYPES["q8_0"].number, 64), Reader())
    assert node.values() is None
    assert not node.readable
