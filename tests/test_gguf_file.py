"""The header reader: against gguf-py's reader and writer, and against files that are cut off or lie."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import INLINE_ELEMENTS, read_array, read_gguf
from a3b_gguf.metadata import SkippedArray


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with every kind of value, written by gguf-py."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits, value in ((8, 7), (16, 700), (32, 70_000), (64, 1 << 40)):
        getattr(writer, f"add_uint{bits}")(f"test.uint{bits}", value)
        getattr(writer, f"add_int{bits}")(f"test.int{bits}", -value)
    writer.add_float32("test.float32", 0.5)
    writer.add_float64("test.float64", 0.25)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "grün")
    writer.add_array("test.small", [1, 2, 3])
    writer.add_array("test.words", [f"w{i}" for i in range(INLINE_ELEMENTS + 1)])
    writer.add_array("test.numbers", list(range(INLINE_ELEMENTS + 5)))
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.ones((2, 3, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_agrees_with_gguf_py(written: Path) -> None:
    ours, theirs = read_gguf(written, arrays=True), gguf.GGUFReader(written)
    for key, value in ours.metadata.items():
        assert value.value == theirs.fields[key].contents(), key
    assert len(ours.metadata) == len([key for key in theirs.fields if not key.startswith("GGUF.")])
    table = {t.name: (tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data_offset, t.n_bytes) for t in theirs.tensors}
    assert {t.name: (t.shape, t.type.number, t.offset, t.nbytes) for t in ours.tensors} == table


def test_agrees_on_the_embedded_model(tiny_bf16: Path) -> None:
    ours, theirs = read_gguf(tiny_bf16, arrays=True), gguf.GGUFReader(tiny_bf16)
    assert {key: value.value for key, value in ours.metadata.items()} == {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert [(t.name, t.offset) for t in ours.tensors] == [(t.name, t.data_offset) for t in theirs.tensors]


def test_long_arrays_are_skipped_and_can_be_read_later(written: Path) -> None:
    file = read_gguf(written)
    assert file.get("test.small") == [1, 2, 3]
    for key, first in (("test.words", "w0"), ("test.numbers", 0)):
        assert isinstance(file.get(key), SkippedArray)
        values = read_array(file, key)
        assert values[0] == first
        assert len(values) == file.get(key).count
        assert values == read_gguf(written, arrays=True).get(key)


def test_every_cut_is_found(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    for length in [*range(0, 200, 7), *range(200, len(data), 997), len(data) - 1]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        for arrays in (False, True):
            with pytest.raises(BadInput, match="cut.gguf"):
                read_gguf(cut, arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "is not a GGUF file"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "version"),
        (lambda d: d[:4] + struct.pack("<I", 9) + d[8:], "version 9"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], "cut off"),
        (lambda d: d[:16] + struct.pack("<Q", 1 << 60) + d[24:], "cut off"),
        (lambda d: d.replace(b"test.int8", b"test.int\xff"), "not UTF-8"),
        (lambda d: d.replace(b"test.int16", b"test.int32"), "occurs twice"),
        (lambda d: d.replace(b"a.weight", b"b.weight"), "occurs twice"),
        (lambda d: b"<!doctype html><html><body>404: not here</body></html>", "is not a GGUF file"),
    ],
)
def test_lies_are_named(written: Path, tmp_path: Path, change: object, message: str) -> None:
    bad = tmp_path / "bad.gguf"
    assert callable(change)
    bad.write_bytes(change(written.read_bytes()))
    with pytest.raises(BadInput, match=message):
        read_gguf(bad)


def test_a_name_as_long_as_the_file_is_not_read(written: Path, tmp_path: Path) -> None:
    data = bytearray(written.read_bytes())
    at = data.index(b"general.architecture") - 8
    data[at : at + 8] = struct.pack("<Q", 1 << 20)
    long = tmp_path / "long.gguf"
    long.write_bytes(bytes(data) + bytes(1 << 21))
    with pytest.raises(BadInput, match="metadata key 0 at byte 32 has 1,048,576 bytes"):
        read_gguf(long)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(BadInput, match="is a folder, expected a .gguf file"):
        read_gguf(tmp_path)


def check_damaged_is_refused_or_read(written: Path, folder: Path, data: st.DataObject) -> None:
    """A header with some bytes changed is read, or refused with BadInput; nothing else, and never a huge allocation."""
    raw = bytearray(written.read_bytes()[:2000])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(bytes(raw) + written.read_bytes()[2000:])
    try:
        file = read_gguf(damaged, arrays=data.draw(st.booleans()))
    except BadInput as error:
        assert str(damaged) in error.message
    else:
        assert file.file_size == damaged.stat().st_size


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_damaged_bytes(written: Path, tmp_path: Path, data: st.DataObject) -> None:
    check_damaged_is_refused_or_read(written, tmp_path, data)


@pytest.mark.prove
@settings(FUZZ, max_examples=20_000)
@given(data=st.data())
def test_damaged_bytes_in_full(written: Path, tmp_path: Path, data: st.DataObject) -> None:
    check_damaged_is_refused_or_read(written, tmp_path, data)
