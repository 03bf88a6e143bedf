"""`--stock` against llama_model_quantize itself: the type of every tensor, and every tensor's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.quantize import Options, quantize_file
from a3b_gguf.gguf_file import GGUFFile, read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.metadata import array, string, u32
from a3b_gguf.tensors import Model, n_rows
from a3b_quantize.assign import NEED_IMPORTANCE, n_dims
from a3b_quantize.file_types import FILE_TYPES, file_type
from a3b_quantize.stock import stock_assignments
from kin_headers import SMALL_VOCAB, Shape, sparse_30b, sparse_80b, sparse_dense, write
from llama_quantize import dry_run_types, llama_quantize
from small_gguf import narrow, write_arrays
from true_header import sparse_35b

NO_IMATRIX = [name for name, each in FILE_TYPES.items() if each.type.name not in NEED_IMPORTANCE and name not in ("q2_k_s", "iq3_xs")]


def ours(model: Model, name: str, has_imatrix: bool = False) -> dict[str, str]:
    return {each.name: each.type.name for each in stock_assignments(model, file_type(name), has_imatrix)}


def assert_same_types(path: Path, has_imatrix: bool) -> None:
    """For every file type: the types are llama-quantize's, and we refuse exactly what it refuses."""
    model = open_gguf_model(path)
    for name, each in FILE_TYPES.items():
        try:
            types = ours(model, name, has_imatrix)
        except BadInput as error:
            assert "no type is known that replaces it" in error.message
            with pytest.raises(AssertionError, match="no tensor type fallback"):
                dry_run_types(path, each.number, has_imatrix)
            continue
        assert types == dry_run_types(path, each.number, has_imatrix), name
        assert len(types) == len(model.tensors)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> dict[str, Path]:
    """One file for each set of rules: experts or none, 8 or more of them, wide and narrow KV heads, tied output, rows that do not fit."""
    folder = tmp_path_factory.mktemp("headers")
    eight = {
        "block_count": 16, "context_length": 4096, "embedding_length": 2048, "feed_forward_length": 768, "attention.head_count": 8,
        "attention.head_count_kv": 1, "expert_count": 8, "expert_used_count": 2,
    }  # fmt: skip
    seventy = {
        "block_count": 80, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 320, "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }  # fmt: skip
    wide = {**seventy, "attention.head_count_kv": 1, "block_count": 24}
    odd = {**seventy, "embedding_length": 80}
    return {
        "tiny-a3b": tiny_bf16,
        "35b": sparse_35b(folder / "35b.gguf", "bf16", SMALL_VOCAB),
        "30b": sparse_30b(folder / "30b.gguf", "bf16"),
        "80b": sparse_80b(folder / "80b.gguf", "bf16"),
        "dense": sparse_dense(folder / "dense.gguf", "bf16"),
        "eight experts": write(folder / "eight.gguf", "llama", eight, "bf16", 512, lambda i: chain(heads(i, 2048), experts(i))),
        "70b": write(folder / "70b.gguf", "llama", seventy, "bf16", 512, lambda i: chain(heads(i, 64), dense(i, 64, 320))),
        "grouped heads": write(folder / "wide.gguf", "llama", wide, "bf16", 512, lambda i: chain(heads(i, 64), dense(i, 64, 320))),
        "rows of 80": write(folder / "odd.gguf", "llama", odd, "bf16", 512, lambda i: chain(heads(i, 80), dense(i, 80, 336))),
    }


def heads(i: int, n_embd: int) -> Iterator[tuple[str, Shape]]:
    for part in ("q", "k", "v", "output"):
        yield f"blk.{i}.attn_{part}.weight", (n_embd, n_embd)


def experts(i: int) -> Iterator[tuple[str, Shape]]:
    for part in ("gate", "up", "down"):
        yield f"blk.{i}.ffn_{part}_exps.weight", (8, 256, 256)


def dense(i: int, n_embd: int, n_ff: int) -> Iterator[tuple[str, Shape]]:
    for part in ("gate", "up"):
        yield f"blk.{i}.ffn_{part}.weight", (n_ff, n_embd)
    yield f"blk.{i}.ffn_down.weight", (n_embd, n_ff)


MODELS = ["tiny-a3b", "35b", "30b", "80b", "dense", "eight experts", "70b", "grouped heads", "rows of 80"]


@pytest.mark.parametrize("model", MODELS)
def test_types_are_those_of_llama_quantize(headers: dict[str, Path], model: str) -> None:
    assert_same_types(headers[model], has_imatrix=False)


@pytest.mark.parametrize("model", ["tiny-a3b", "30b", "dense", "eight experts", "rows of 80"])
def test_types_with_an_importance_matrix(headers: dict[str, Path], model: str) -> None:
    assert_same_types(headers[model], has_imatrix=True)


def test_the_35b_has_733_tensors_and_meets_the_rules(headers: dict[str, Path]) -> None:
    """The table of the research, so that an oracle which parses nothing cannot pass."""
    model = open_gguf_model(headers["35b"])
    types = ours(model, "q4_k_m")
    assert len(types) == 733
    boosted = {name for name, kind in types.items() if kind == "q6_k" and name.endswith("ffn_down_exps.weight")}
    layers = [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39]
    assert boosted == {f"blk.{i}.ffn_down_exps.weight" for i in layers}
    assert ours(model, "iq4_nl")["blk.0.attn_qkv.weight"] == "q5_k"


def same_tensors(a: Path, b: Path) -> GGUFFile:
    """Asserts that two files hold the same tensors, byte for byte, in whatever order."""
    left, right = open_gguf_model(a), open_gguf_model(b)
    theirs = {tensor.name: tensor for tensor in right.tensors}
    assert {tensor.name for tensor in left.tensors} == set(theirs)
    for tensor in left.tensors:
        other = theirs[tensor.name]
        # llama.cpp writes a [1, n] tensor as [n].
        assert (tensor.type, tensor.shape[-n_dims(tensor.shape) :]) == (other.type, other.shape), tensor.name
        assert bytes(tensor.raw(0, n_rows(tensor.shape))) == bytes(other.raw(0, n_rows(other.shape))), tensor.name
    return read_gguf(a, arrays=True)


# ggml's IQ4_NL alone takes 5 seconds; below it is tried on a narrow model.
@pytest.mark.parametrize("name", ["q4_k_m", pytest.param("iq4_nl", marks=pytest.mark.prove)])
def test_bytes_of_the_embedded_model(tiny_bf16: Path, tmp_path: Path, name: str) -> None:
    theirs = llama_quantize(tiny_bf16, tmp_path / "theirs.gguf", FILE_TYPES[name].number)
    quantize_file(tiny_bf16, tmp_path / "ours.gguf", Options(name, stock=True, bounds=False))
    written = same_tensors(tmp_path / "ours.gguf", theirs)
    metadata = dict(written.metadata)
    assert metadata.pop("a3b.recipe").value == f"stock:{name}"
    assert metadata == dict(read_gguf(theirs, arrays=True).metadata)


@pytest.fixture(scope="module")
def narrow_bf16(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Path:
    return narrow(tiny_bf16, tmp_path_factory.mktemp("narrow") / "narrow.gguf")


@pytest.mark.parametrize("name", NO_IMATRIX)
def test_bytes_of_every_type(narrow_bf16: Path, tmp_path: Path, name: str) -> None:
    theirs = llama_quantize(narrow_bf16, tmp_path / "theirs.gguf", FILE_TYPES[name].number)
    quantize_file(narrow_bf16, tmp_path / "ours.gguf", Options(name, stock=True, bounds=False))
    same_tensors(tmp_path / "ours.gguf", theirs)


@pytest.mark.parametrize("name", ["iq2_xxs", "iq2_m", "iq3_xs", "iq1_s", "q2_k_s"])
def test_types_that_need_an_importance_matrix_are_refused(narrow_bf16: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="importance matrix"):
        quantize_file(narrow_bf16, tmp_path / "ours.gguf", Options(name, stock=True, bounds=False))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="requires an imatrix"):
        llama_quantize(narrow_bf16, tmp_path / "theirs.gguf", FILE_TYPES[name].number)


def test_no_replacement(headers: dict[str, Path]) -> None:
    """Where llama-quantize finds no type for a row, we say so instead of choosing one."""
    with pytest.raises(BadInput, match="rows of 80 do not fit q1_0 blocks of 128"):
        ours(open_gguf_model(headers["rows of 80"]), "q1_0")
    with pytest.raises(AssertionError, match="no tensor type fallback"):
        dry_run_types(headers["rows of 80"], FILE_TYPES["q1_0"].number)


def test_architectures_with_rules_of_their_own_are_refused() -> None:
    with pytest.raises(UsageError, match="falcon"):
        stock_assignments(Model({"general.architecture": string("falcon"), "falcon.block_count": u32(1)}, ()), file_type("q4_0"))


def test_heads_of_layer_0_decide(headers: dict[str, Path], tmp_path: Path) -> None:
    """A per-layer array whose first layer has no KV heads gets no boost."""
    model = open_gguf_model(headers["35b"])
    per_layer = {**model.metadata, "qwen35moe.attention.head_count_kv": array("u32", [0, 0, 0, 2] * 10)}
    changed = {a.name: a.type.name for a in stock_assignments(Model(per_layer, model.tensors), file_type("iq4_nl"))}
    assert changed["blk.3.attn_v.weight"] == "iq4_nl"


def test_a_layer_outside_the_model_is_refused(tmp_path: Path) -> None:
    metadata = {
        **{key: value for key, value in open_gguf_model(write_arrays(tmp_path / "a.gguf", {})).metadata.items()},
        "llama.expert_count": u32(16),
    }
    path = write_arrays(tmp_path / "b.gguf", {"blk.7.ffn_down_exps.weight": np.zeros((2, 2, 256), np.float32)}, metadata)
    with pytest.raises(BadInput, match=r"blk\.7\.ffn_down_exps"):
        ours(open_gguf_model(path), "q4_k_m")
