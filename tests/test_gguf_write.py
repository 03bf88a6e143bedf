"""The writer: what it writes is what gguf-py reads, and a failure leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import file_size, refuse_same_file, write_gguf
from a3b_gguf.metadata import Metadata, array, boolean, f32, i32, string, u32
from a3b_gguf.tensors import TYPES, TensorJob

METADATA: Metadata = {
    "general.architecture": string("llama"),
    "general.name": string("ß 模型"),
    "llama.block_count": u32(2),
    "test.negative": i32(-3),
    "test.float": f32(0.5),
    "test.bool": boolean(True),
    "test.strings": array("str", ["a", "", "ö"]),
    "test.bools": array("bool", [True, False]),
}


def job(name: str, values: np.ndarray, pieces: int = 1) -> TensorJob:
    def chunks() -> Iterator[bytes]:
        for part in np.array_split(values.reshape(-1), pieces):
            yield part.tobytes()

    return TensorJob(name, values.shape, TYPES["f32"], chunks)


def test_gguf_py_reads_what_we_write(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"a.weight": rng.random((3, 5), np.float32), "b": rng.random(7, np.float32), "c.weight": rng.random((2, 3, 4), np.float32)}
    path = tmp_path / "out.gguf"
    jobs = [job(name, value, pieces=3) for name, value in tensors.items()]
    assert write_gguf(path, METADATA, jobs) == path.stat().st_size == file_size(METADATA, jobs)
    theirs = gguf.GGUFReader(path)
    assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == {k: v.value for k, v in METADATA.items()}
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(tensor.data.reshape(tensors[tensor.name].shape), tensors[tensor.name])
    assert dict(read_gguf(path).metadata) == METADATA


def test_rows_of_float_types(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(f"{kind.name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for tensor in open_gguf_model(path).tensors:
        kind = gguf.GGMLQuantizationType[tensor.type.name.upper()]
        expected = gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(tensor.rows(2, 5), expected[2:5])
        assert bytes(tensor.raw(2, 5)) == gguf.quantize(values, kind)[2:5].tobytes()


def test_a_failing_chunk_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"\0" * 16
        raise ValueError("the source broke")

    path = tmp_path / "out.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="the source broke"):
        write_gguf(path, METADATA, [TensorJob("a", (8,), TYPES["f32"], chunks)])
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]
    assert path.read_bytes() == b"old"


def test_a_short_tensor_is_a_bug_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="promised"):
        write_gguf(tmp_path / "out.gguf", METADATA, [TensorJob("a", (8,), TYPES["f32"], lambda: iter([b"1234"]))])
    assert list(tmp_path.iterdir()) == []


def test_full_disk(tmp_path: Path) -> None:
    """A file size limit stands for a disk that fills up on the way: one message, exit 4 in a command, nothing left."""
    script = f"""
import resource, signal
from pathlib import Path
from a3b_gguf.errors import MachineLacks
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.tensors import TYPES, TensorJob
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_gguf(Path({str(tmp_path / "out.gguf")!r}), {{}}, [TensorJob("a", (1 << 20,), TYPES["f32"], lambda: iter([bytes(1 << 22)]))])
except MachineLacks as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "File too large while writing" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_space_is_said_before_the_first_byte(tmp_path: Path) -> None:
    huge = TensorJob("a", (1 << 30, 1 << 20), TYPES["f32"], lambda: iter([]))
    with pytest.raises(MachineLacks, match="needs 4096.00 TiB"):
        write_gguf(tmp_path / "out.gguf", METADATA, [huge])
    assert list(tmp_path.iterdir()) == []


def test_folder_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        write_gguf(tmp_path / "none" / "out.gguf", METADATA, [])


def test_output_equal_to_input_through_links(tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(b"x")
    (tmp_path / "soft.gguf").symlink_to(source)
    (tmp_path / "hard.gguf").hardlink_to(source)
    for name in ("in.gguf", "soft.gguf", "hard.gguf"):
        with pytest.raises(UsageError, match="is the input"):
            refuse_same_file([tmp_path / name], [source])
    refuse_same_file([tmp_path / "other.gguf"], [source])
