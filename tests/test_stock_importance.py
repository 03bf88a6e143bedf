"""`--stock --kernel ggml` with an importance matrix, with --tensor-type and from quantized sources: llama_model_quantize's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3b_gguf.flows.quantize import quantize_file
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import TYPES
from a3b_quantize.file_types import FILE_TYPES, file_type
from a3b_quantize.imatrix import write_imatrix
from a3b_quantize.stock import stock_assignments
from golden_files import read_golden
from imatrix_files import digests, made_up, values_of, write_dat
from kin_headers import sparse_30b
from llama_quantize import dry_run_types, llama_quantize
from small_gguf import narrow
from test_stock import ours, same_tensors
from true_header import sparse_35b

EIGHT = ["iq4_nl", "q4_k_m", "iq4_xs", "q8_0", "mxfp4_moe", "q5_k_m", "q6_k", "q3_k_m"]
NEED_IT = ["iq2_xxs", "iq3_xs", "q2_k_s"]
# ggml builds large tables for these
SLOW = [pytest.param(name, marks=pytest.mark.prove) for name in ("iq3_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq1_s", "iq1_m")]


@pytest.fixture(scope="module")
def narrow_bf16(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Path:
    return narrow(tiny_bf16, tmp_path_factory.mktemp("narrow") / "narrow.gguf", rows=2)


def assert_same_bytes(source: Path, folder: Path, name: str, weighted: bool) -> None:
    imatrix = made_up(source)
    write_imatrix(folder / "imatrix.gguf", imatrix)
    number = FILE_TYPES[name].number
    theirs = llama_quantize(source, folder / "theirs.gguf", number, importance=values_of(imatrix) if weighted else None)
    options = Options(name, stock=True, kernel="ggml", bounds=False, imatrix=folder / "imatrix.gguf" if weighted else None)
    same_tensors(quantize_file(source, folder / "ours.gguf", options).path, theirs)


@pytest.mark.prove
@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_of_the_embedded_model(tiny_bf16: Path, tmp_path: Path, name: str, weighted: bool) -> None:
    assert_same_bytes(tiny_bf16, tmp_path, name, weighted)


@pytest.mark.parametrize("name", EIGHT)
def test_bytes_with_importance(narrow_bf16: Path, tmp_path: Path, name: str) -> None:
    """Two rows of every matrix of the embedded model; without importance: test_stock."""
    assert_same_bytes(narrow_bf16, tmp_path, name, weighted=True)


@pytest.mark.parametrize("name", [*NEED_IT, *SLOW])
def test_bytes_of_types_that_need_importance(narrow_bf16: Path, tmp_path: Path, name: str) -> None:
    assert_same_bytes(narrow_bf16, tmp_path, name, weighted=True)


def test_llama_quantize_itself_reads_our_files(tiny_checkpoint: Path, narrow_bf16: Path, tmp_path: Path) -> None:
    """The program, with files that we wrote in both formats: its bytes and its notes in the metadata."""
    golden = read_golden("quantize_llama_quantize.json", "quantize_llama_quantize.py", tiny_checkpoint)
    imatrix = made_up(narrow_bf16)
    write_imatrix(tmp_path / "imatrix.gguf", imatrix)
    write_dat(tmp_path / "imatrix.dat", values_of(imatrix))
    for run in golden["runs"]:
        name = tmp_path / run["imatrix"]
        done = quantize_file(narrow_bf16, tmp_path / "out.gguf", Options(run["type"], stock=True, bounds=False, imatrix=name))
        assert digests(done.path) == run["tensors"], run["type"]
        notes = {key: [value.kind, value.value] for key, value in read_gguf(done.path).metadata.items() if key.startswith("quantize.")}
        assert notes == {**run["metadata"], "quantize.imatrix.file": ["str", str(name)[:127]]}


def test_types_of_the_35b_with_importance(tmp_path: Path) -> None:
    """All 733 tensors; without importance: test_stock."""
    path = sparse_35b(tmp_path / "35b.gguf", "bf16", n_vocab=4096)
    model = open_gguf_model(path)
    for name in EIGHT:
        types = ours(model, name, has_imatrix=True)
        assert len(types) == 733
        assert types == dry_run_types(path, FILE_TYPES[name].number, with_imatrix=True), name


def test_types_that_the_user_gives(narrow_bf16: Path, tmp_path: Path) -> None:
    """The first pattern that matches wins, and what it takes the mixture's rules do not count."""
    patterns = [(r"blk\.0\.attn_qkv", "q8_0"), (r"attn_(qkv|v)\.weight", "q5_k"), ("^output", "q4_0")]
    theirs = llama_quantize(
        narrow_bf16,
        tmp_path / "theirs.gguf",
        FILE_TYPES["q4_k_m"].number,
        tensor_types=[(regex, TYPES[kind].number) for regex, kind in patterns],
    )
    flags = tuple(f"{regex}={kind}" for regex, kind in patterns)
    done = quantize_file(narrow_bf16, tmp_path / "ours.gguf", Options("q4_k_m", stock=True, bounds=False, tensor_types=flags))
    same_tensors(done.path, theirs)
    types = {tensor.name: tensor.type.name for tensor in open_gguf_model(done.path).tensors}
    assert (types["blk.0.attn_qkv.weight"], types["blk.1.attn_qkv.weight"], types["output.weight"]) == ("q8_0", "q5_k", "q4_0")


def test_the_rules_do_not_count_what_the_user_decides(tmp_path: Path) -> None:
    """Q3_K_M favours the first two attn_v tensors; the user decides about the first, so the third comes in."""
    model = open_gguf_model(sparse_30b(tmp_path / "30b.gguf", "bf16"))
    first, third = "blk.0.attn_v.weight", "blk.2.attn_v.weight"
    assert ours(model, "q3_k_m")[third] == "q4_k"
    decided = {each.name: each.type.name for each in stock_assignments(model, file_type("q3_k_m"), manual={first})}
    assert (first in decided, decided[third]) == (False, "q5_k")


@pytest.mark.parametrize("kind", ["q8_0", "mxfp4", "q4_k", "iq4_nl", "q5_0"])
def test_requantizing(narrow_bf16: Path, tmp_path: Path, kind: str) -> None:
    """From a quantized source both decode alike, and what keeps its type is copied."""
    source = quantize_file(narrow_bf16, tmp_path / "source.gguf", Options(kind, pure=True, kernel="ggml", bounds=False)).path
    theirs = llama_quantize(source, tmp_path / "theirs.gguf", FILE_TYPES["iq4_nl"].number, allow_requantize=True)
    options = Options("iq4_nl", stock=True, bounds=False, allow_requantize=True)
    done = quantize_file(source, tmp_path / "ours.gguf", options)
    same_tensors(done.path, theirs)
    assert any(f"quantized already ({kind})" in note for note in done.notes)
