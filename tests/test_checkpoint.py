"""Checkpoint folders and safetensors files: every broken promise is a message of its own, and nothing is read beyond what was asked."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_convert.checkpoint import read_checkpoint
from a3b_convert.safetensors_file import MAX_HEADER, read_safetensors
from a3b_gguf.errors import BadInput
from tiny import Form, Sizes, save, weights, write_checkpoint, write_index

SMALL = Sizes(n_layer=1)
VALUES = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float32)}


def raw_file(path: Path, header: Any, n_bytes: int) -> Path:
    """A safetensors file with this header, as JSON or as it is, before `n_bytes` zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(n_bytes))
    return path


def entry(start: int, stop: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_tensors_are_read_by_rows(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", VALUES, "F32")
    found = read_safetensors(tmp_path / "x.safetensors")
    assert {name: (tensor.shape, tensor.dtype, tensor.type.name) for name, tensor in found.items()} == {
        "a": ((2, 3), "F32", "f32"),
        "b": ((4,), "F32", "f32"),
    }
    assert np.frombuffer(found["a"].read(1, 2), np.float32).tolist() == [3, 4, 5]
    assert np.frombuffer(found["b"].read(0, 1), np.float32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("header", "n_bytes", "said"),
    [
        ({"a": entry(0, 8, 2)}, 7, "is cut off: its tensors need 8 bytes after the header, the file has 7"),
        ({"a": entry(0, 8, 2)}, 9, "has 1 bytes more than its tensors need"),
        ({"a": entry(0, 8, 3)}, 8, r"tensor a of shape \[3\] in F32 needs 12 bytes, data_offsets \[0, 8\] give 8"),
        ({"a": entry(8, 0, 2)}, 8, r"data_offsets \[8, 0\] give -8"),
        ({"a": entry(0, 8, 2), "b": entry(4, 12, 2)}, 12, "tensor b starts at byte 4 of the data, expected 8: it overlaps"),
        ({"a": entry(0, 8, 2), "b": entry(12, 20, 2)}, 20, "tensor b starts at byte 12 of the data, expected 8: it leaves a hole"),
        ({"a": entry(4, 12, 2)}, 12, "tensor a starts at byte 4 of the data, expected 0"),
        ({"a": entry(0, 8, 2, dtype="F33")}, 8, "tensor a has the unknown dtype 'F33'"),
        ({"a": entry(0, 8, -2)}, 8, "expected whole numbers"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4, "expected whole numbers"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, 8, "expected whole numbers"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, 8, "expected whole numbers"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, 8, "the unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "lacks dtype, shape or data_offsets"),
        ({"a": 3}, 8, "lacks dtype, shape or data_offsets"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}', 8, "a occurs twice in the header"),
        (b"[1]", 0, "the header is not an object"),
        (b'{"a"', 0, "the header is not JSON"),
        (b'{"\xff": 1}', 0, "the header is not JSON"),
        (b"[" * 100_000, 0, "the header is not JSON"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, n_bytes: int, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_safetensors(raw_file(tmp_path / "x.safetensors", header, n_bytes))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (struct.pack("<Q", 100) + b"{}", "is cut off: its header needs 108 bytes, the file has 10"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "no safetensors file: its header would have 100,000,001 bytes"),
        (b"GGUF\x03\0\0\0" + bytes(64), "no safetensors file"),
    ],
)
def test_a_length_that_cannot_be_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=said):
        read_safetensors(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, VALUES, "F32")
    tensor = read_safetensors(path)["b"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInput, match="it changed while it was read"):
        tensor.read(0, 1)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_placed(tmp_path: Path, dtype: str, value: float) -> None:
    values = {"experts": np.zeros((2, 3, 4), np.float32), "matrix": np.zeros((2, 4), np.float32), "vector": np.zeros(4, np.float32)}
    values["experts"][1, 2, 3] = values["matrix"][1, 2] = values["vector"][1] = value
    if np.isnan(value) and np.signbit(value):
        values = {name: np.copysign(array, np.where(np.isnan(array), -1, 1)).astype(np.float32) for name, array in values.items()}
    path = tmp_path / "x.safetensors"
    save(path, values, dtype)
    found = read_safetensors(path)
    found["experts"].read(0, 5)  # the bad row is not among these
    with pytest.raises(BadInput, match="tensor experts, expert 1, row 2, column 3 is NaN or infinite"):
        found["experts"].read(2, 6)
    with pytest.raises(BadInput, match="tensor matrix, row 1, column 2 is NaN or infinite"):
        found["matrix"].read(1, 2)
    with pytest.raises(BadInput, match="tensor vector, column 1 is NaN or infinite"):
        found["vector"].read(0, 1)


def test_the_largest_and_smallest_values_are_finite(tmp_path: Path) -> None:
    for dtype, largest in (("F32", np.finfo(np.float32).max), ("F16", 65504.0), ("BF16", 3.3895313892515355e38)):
        path = tmp_path / f"{dtype}.safetensors"
        save(path, {"x": np.array([largest, -largest, 0.0, -0.0, 1e-40], np.float32)}, dtype)
        assert read_safetensors(path)["x"].read(0, 1)


Break = Callable[[Path], object]


def reindex(edit: Callable[[dict[str, Any]], object]) -> Break:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        edit(weight_map)
        write_index(folder, weight_map)

    return change


SECOND = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: (f / SECOND).unlink(), f"index.json names {SECOND}, which is not there; it holds"),
        (reindex(lambda m: m.update(extra=SECOND)), f"index.json promises tensors that {SECOND} lacks: extra"),
        (reindex(lambda m: m.pop(NORM)), f"has tensors that model.safetensors.index.json does not know: {NORM}"),
        (reindex(lambda m: m.update({NORM: SECOND if m[NORM] != SECOND else SECOND.replace("2", "1", 1)})), f"tensor {NORM} is in"),
        (reindex(lambda m: m.update({NORM: "../model.safetensors"})), "is said to be in '../model.safetensors', expected a file name"),
        (reindex(lambda m: m.update({NORM: 3})), "is said to be in 3"),
        (reindex(lambda m: m.update({NORM: "m" * 256})), "is said to be in 'mmmm"),
        (reindex(lambda m: m.update({NORM: "\ud800"})), "names \ud800, which is not there"),
        (reindex(lambda m: m.clear()), "key weight_map is missing or empty"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json: line 1"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "holds list, expected an object"),
        (lambda f: save(f / SECOND, {"a": np.zeros(2, np.float32)}), "promises tensors that"),
    ],
)
def test_index_and_shards_must_agree(tmp_path: Path, break_it: Break, said: str) -> None:
    folder = write_checkpoint(tmp_path, Form(shards=3), SMALL)
    break_it(folder)
    with pytest.raises(BadInput) as caught:
        read_checkpoint(folder)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: (f / SECOND).unlink(), "2 of 3 shards are there; missing 00002"),
        (lambda f: shutil.copy(f / SECOND, f / "model-00007-of-00009.safetensors"), "files of several checkpoints"),
        (lambda f: shutil.copy(f / SECOND, f / "model.safetensors"), "files of several checkpoints"),
        (lambda f: shutil.copy(f / SECOND, f / "model-00001-of-00003.safetensors"), "is in model-00001-of-00003.safetensors and in"),
        (lambda f: shutil.copy(f / SECOND, f / "model-00004-of-00003.safetensors"), "shard numbers beyond the 3 that the names promise: 4"),
    ],
)
def test_without_an_index_the_shards_numbers_must_be_whole(tmp_path: Path, break_it: Break, said: str) -> None:
    folder = write_checkpoint(tmp_path, Form(shards=3, index=False), SMALL)
    assert read_checkpoint(folder).tensors.keys() == weights(SMALL).keys()
    break_it(folder)
    with pytest.raises(BadInput) as caught:
        read_checkpoint(folder)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "has no safetensors"),
        (["pytorch_model.bin"], "holds PyTorch pickles, no safetensors"),
        (["model.gguf"], "holds a GGUF file, no safetensors"),
        (["mtp.safetensors"], "no model.safetensors, only mtp.safetensors"),
        (["model.safetensors", "model_extra.safetensors"], "and besides model.safetensors model_extra.safetensors"),
    ],
)
def test_a_folder_without_a_checkpoint_says_what_it_holds(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        save(tmp_path / name, VALUES)
    with pytest.raises(BadInput) as caught:
        read_checkpoint(tmp_path)
    assert said in caught.value.message


def test_an_absent_shard_of_mtp_tensors_is_no_loss_without_mtp(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Form(mtp=False), SMALL)
    trunk = dict.fromkeys(weights(SMALL, mtp=False), "model.safetensors")
    write_index(folder, trunk | dict.fromkeys(weights(SMALL).keys() - trunk.keys(), "mtp.safetensors"))
    with pytest.raises(BadInput, match=r"names mtp\.safetensors, which is not there") as caught:
        read_checkpoint(folder)
    assert "--no-mtp" in caught.value.hint
    assert read_checkpoint(folder, mtp=False).tensors.keys() == trunk.keys()


def test_mtp_tensors_that_are_there_are_left_out_when_asked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Form(shards=2), SMALL)
    found = read_checkpoint(folder, mtp=False)
    assert found.left_out
    assert found.tensors.keys() == weights(SMALL, mtp=False).keys()
