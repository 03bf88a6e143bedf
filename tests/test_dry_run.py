"""The dry run tells what a real load takes, and how a load would fail, without ending this process."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

from a3b_gguf.errors import BadInput, MachineLacks
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama import dry_run as module
from a3b_gguf.llama.buffers import Buffer, printed_buffers
from a3b_gguf.llama.dry_run import dry_run
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.units import MIB
from true_header import sparse_35b

KIND_OF_LINE = {"model": "model", "kv": "context", "recurrent": "context", "compute": "compute", "output": "compute"}


def by_kind(buffers: tuple[Buffer, ...]) -> dict[str, float]:
    sizes: dict[str, float] = defaultdict(float)
    for each in buffers:
        sizes[KIND_OF_LINE.get(each.kind, each.kind)] += each.n_bytes / MIB
    return dict(sizes)


@pytest.mark.parametrize(
    "load",
    [LoadParams(n_ctx=4096, use_mmap=False), LoadParams(n_ctx=8192, n_seq_max=4, n_outputs_max=4, kv_type_k="q8_0", kv_type_v="q4_0")],
)
def test_it_tells_what_a_real_load_takes(tiny_bf16: Path, load: LoadParams) -> None:
    told = dry_run(tiny_bf16, load)
    assert told.exact
    assert told.n_ctx == load.n_ctx
    with load_model(tiny_bf16, load) as model, open_context(model, load) as context:
        real = by_kind(printed_buffers((*model.log, *context.log)))
    found = by_kind(told.buffers)
    assert found["context"] == pytest.approx(real["context"], abs=0.02)
    assert found["compute"] == pytest.approx(real["compute"], abs=0.02)
    trunk = sum(t.nbytes for t in read_gguf(tiny_bf16).tensors if not t.name.startswith("blk.4."))  # blk.4 is the MTP block
    assert 0 <= round(found["model"] * MIB) - trunk < 1024  # tensors start at multiples of 32


def test_a_file_of_19_gib_is_not_read(tmp_path: Path) -> None:
    path = sparse_35b(tmp_path / "sparse.gguf", "iq4_nl")
    told = dry_run(path, LoadParams(n_ctx=65536, kv_type_k="q8_0", kv_type_v="q8_0"))
    assert by_kind(told.buffers)["context"] == pytest.approx(680 + 62.81, abs=0.02)  # what llama.cpp printed for this model
    assert path.stat().st_blocks * 512 < 100 * MIB


def test_failures_are_those_of_a_load(tiny_bf16: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_bf16.read_bytes()[:300_000])
    with pytest.raises(BadInput, match=r"cut\.gguf"):
        dry_run(cut, LoadParams(n_ctx=512))
    with pytest.raises(BadInput, match="not a file"):
        dry_run(tmp_path / "missing.gguf", LoadParams(n_ctx=512))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, sys; print('ggml.c:1: GGML_ASSERT(n > 0) failed', file=sys.stderr); os.abort()", r"GGML_ASSERT\(n > 0\)"),
        ("import time; time.sleep(60)", "did not end"),
    ],
)
def test_a_child_that_is_ended_is_an_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.5)
    with pytest.raises(MachineLacks, match=says) as caught:
        dry_run(tmp_path / "m.gguf", LoadParams(n_ctx=512))
    assert "--no-dry-run" in caught.value.hint


def test_without_the_table_the_log_tells(tiny_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BREAKDOWN", "no_such_function")
    assert module.breakdown(None) is None
