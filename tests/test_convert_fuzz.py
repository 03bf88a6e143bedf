"""Mutated safetensors headers, config.json and tokenizer.json: always an error of ours, or a file that holds the model."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a3b_convert import convert
from a3b_gguf.errors import A3BError
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import n_rows
from fp8 import FP8, write_fp8
from json_mutations import BYTE_CHANGES, CHANGES, Bytes, Change, changed, text_of
from tiny import Form, Sizes, write_checkpoint

SMALL, PLAIN = Sizes(n_layer=1), Form(mtp=False)
MOST_CHANGES = 3
FP8_FILES = {"quantization_config": "config.json", "scales": "model.safetensors"}  # of a checkpoint in FP8


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint of which one file is changed again and again. original: its bytes."""

    folder: Path
    path: Path
    original: bytes

    def run(self, data: bytes) -> str:
        """Converts with this file in place: "converted", or the error's message. Any other exception passes."""
        self.path.write_bytes(data)
        output = self.folder.parent / "x.gguf"
        try:
            done = convert(self.folder, output)
        except A3BError as error:
            assert error.message
            assert not output.exists()
            return error.message
        finally:
            self.path.write_bytes(self.original)
        model = open_gguf_model(output)
        assert len(model.tensors) == done.n_tensors > 0
        for tensor in model.tensors:
            assert tensor.rows(0, n_rows(tensor.shape)).size
        output.unlink()
        return "converted"


def files(tmp_path_factory: pytest.TempPathFactory, name: str) -> Files:
    folder = tmp_path_factory.mktemp("fuzz") / "tiny"
    if name in FP8_FILES:
        write_fp8(folder, FP8("compressed-tensors", "channel"), PLAIN, SMALL)
        name = FP8_FILES[name]
    else:
        write_checkpoint(folder, Form(mtp=False, shards=1 + ("index" in name)), SMALL)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [262, 260], "top_k": 20, "top_p": 0.9}))
    return Files(folder, folder / name, (folder / name).read_bytes())


@pytest.fixture(
    scope="module",
    params=[
        "config.json",
        "quantization_config",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "generation_config.json",
    ],
)
def document(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files(tmp_path_factory, request.param)


@pytest.fixture(scope="module", params=["model.safetensors", "scales"])
def tensors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files(tmp_path_factory, request.param)


def with_header(original: bytes, header: Callable[[bytes], bytes]) -> bytes:
    """The file with another header, its length put right."""
    (length,) = struct.unpack("<Q", original[:8])
    text = header(original[8 : 8 + length])
    return struct.pack("<Q", len(text)) + text + original[8 + length :]


def fuzz_json(document: Files, changes: list[Change], bytes_: list[Bytes]) -> None:
    text = text_of(changed(json.loads(document.original), changes)) if changes else document.original
    for change in bytes_:
        text = change.apply(text)
    document.run(text)


def fuzz_header(tensors: Files, changes: list[Change], bytes_: list[Bytes], anywhere: Bytes | None) -> None:
    def header(text: bytes) -> bytes:
        text = text_of(changed(json.loads(text), changes))
        for change in bytes_:
            text = change.apply(text)
        return text

    data = with_header(tensors.original, header)
    tensors.run(anywhere.apply(data) if anywhere else data)


few_changes = st.lists(CHANGES, max_size=MOST_CHANGES)
few_bytes = st.lists(BYTE_CHANGES, max_size=1)


def cases(count: int) -> settings:
    fixtures = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    return settings(max_examples=count, deadline=None, suppress_health_check=fixtures, database=None)


@cases(40)
@given(changes=few_changes, bytes_=few_bytes)
def test_json_files(document: Files, changes: list[Change], bytes_: list[Bytes]) -> None:
    fuzz_json(document, changes, bytes_)


@cases(60)
@given(changes=few_changes, bytes_=few_bytes, anywhere=st.none() | BYTE_CHANGES)
def test_safetensors_headers(tensors: Files, changes: list[Change], bytes_: list[Bytes], anywhere: Bytes | None) -> None:
    fuzz_header(tensors, changes, bytes_, anywhere)


@pytest.mark.prove
@cases(2400)
@given(changes=few_changes, bytes_=few_bytes)
def test_json_files_20_000_cases_in_all(document: Files, changes: list[Change], bytes_: list[Bytes]) -> None:
    fuzz_json(document, changes, bytes_)


@pytest.mark.prove
@cases(3000)
@given(changes=few_changes, bytes_=few_bytes, anywhere=st.none() | BYTE_CHANGES)
def test_safetensors_headers_20_000_cases_in_all(
    tensors: Files, changes: list[Change], bytes_: list[Bytes], anywhere: Bytes | None
) -> None:
    fuzz_header(tensors, changes, bytes_, anywhere)


def test_the_unchanged_files_convert(document: Files, tensors: Files) -> None:
    for found in (document, tensors):
        assert found.run(found.original) == "converted"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("config.json", b'"vocab_size": 320', b'"vocab_size": ' + b"9" * 5000, "config.json"),
        ("config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1' + b"0" * 400, "rms_norm_eps"),
        ("tokenizer.json", b'"version": "1.0"', b'"version": ' + b"9" * 5000, "tokenizer.json"),
        ("model.safetensors", b'{"__metadata__":{"format":"pt"}', b'{"__metadata__":' + b"9" * 5000, "header"),
    ],
)
def test_numbers_that_python_does_not_read(tmp_path_factory: pytest.TempPathFactory, name: str, old: bytes, new: bytes, said: str) -> None:
    found = files(tmp_path_factory, name)
    assert found.original.count(old) == 1
    if name == "model.safetensors":
        data = with_header(found.original, lambda text: text.replace(old, new))
    else:
        data = found.original.replace(old, new)
    assert said in found.run(data)
    shutil.rmtree(found.folder)
