"""clip_bounds.bin: the file, whose it is, and a measuring run that dies."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.clip_bounds import RECORD, SITES, Bounds, Header, Record, read_bounds
from a3b_gguf.errors import BadInput
from a3b_gguf.flows import bounds as flow
from a3b_gguf.flows.bounds import MARGIN, measure_bounds
from a3b_gguf.flows.quantize import Options, quantize_file
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.model_id import file_sha256, model_id
from a3b_quantize.bounds import check_model, write_bounds
from a3b_quantize.measure import measure
from command import a3b
from small_gguf import write_arrays

DOC = Path(__file__).parent.parent / "docs" / "clip-bounds.md"
HEADER = Header("Modell ß", "qwen35moe", "ab" * 32, "cd" * 32, 512, "text", "ef" * 32, {"a3b": "0.1.0"})
RECORDS = (
    Record(0, "attn_in", -1, 1 << 40, 0, 4.5, 0.5, 1.0, 2.0, 3.0, 17.0),
    Record(39, "down_in", 255, 7, 3, 65504.0, 0.0, 2.0**-70, 1.5, 1.5, 2.0**100),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "clip_bounds.bin"
    write_bounds(path, HEADER, RECORDS)
    found = read_bounds(path)
    assert found.header == HEADER
    assert found.records == RECORDS
    assert path.stat().st_size % 64 == (len(RECORDS) * 48) % 64


def test_the_documented_bytes(tmp_path: Path) -> None:
    """The layout of the specification, packed by hand."""
    path = tmp_path / "clip_bounds.bin"
    write_bounds(path, HEADER, RECORDS[:1])
    data = path.read_bytes()
    assert RECORD.size == 48
    assert data[:8] == b"A3BCLIP1"
    length = struct.unpack_from("<I", data, 8)[0]
    assert set(json.loads(data[12 : 12 + length])) == {
        "model", "architecture", "model_id", "file_sha256", "tokens", "data", "versions", "records"
    }  # fmt: skip
    assert data[-48:] == struct.pack("<HHiQIffffffI", 0, 0, -1, 1 << 40, 0, 4.5, 0.5, 1.0, 2.0, 3.0, 17.0, 0)


def test_three_lines_of_numpy_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bounds(tmp_path / "clip_bounds.bin", HEADER, RECORDS)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert code
    assert len(code[1].splitlines()) == 3
    names: dict[str, object] = {"np": np, "json": json}
    exec(code[1], names)
    header, records = names["header"], names["records"]
    assert isinstance(header, dict)
    assert isinstance(records, np.ndarray)
    assert header["model"] == "Modell ß"
    assert records["f2"].tolist() == [-1, 255]
    assert records["f5"].tolist() == [4.5, 65504.0]


def test_sites_of_the_document_are_ours() -> None:
    rows = re.findall(r"^\| (\d) \| (\w+_\w+|residual) \|", DOC.read_text(), re.MULTILINE)
    assert rows == [(str(number), site) for number, site in enumerate(SITES)]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip_bounds.bin"
    write_bounds(path, HEADER, RECORDS)
    whole = path.read_bytes()
    for n_bytes in range(len(whole)):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(BadInput, match=re.escape(str(path))):
            read_bounds(path)
    for changed, said in (
        (whole + b"\0", "promises 2 records"),
        (b"GGUF" + whole[4:], "is not a clip_bounds file"),
        (whole.replace(b'"records": 2', b'"records": 3'), "promises 3 records"),
        (whole.replace(b'"records"', b'"recorbs"'), "its header is not what it must be"),
        (whole.replace(b'"tokens": 512', b'"tokens": "x"'), "its header is not what it must be"),
        (whole[:-46] + b"\x0a" + whole[-45:], "record 1 has site 10"),
        (whole[:-1] + b"\1", "in its last field"),
        (whole[:-28] + struct.pack("<f", float("nan")) + whole[-24:], "record 1 has a range that is NaN"),
        (whole[:-28] + struct.pack("<f", -1.0) + whole[-24:], "NaN or negative"),
        (whole[:8] + b"\xff\xff\xff\xff" + whole[12:], "cut off"),
    ):
        path.write_bytes(changed)
        with pytest.raises(BadInput, match=said):
            read_bounds(path)
    with pytest.raises(BadInput, match="No such file"):
        read_bounds(tmp_path / "missing.bin")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    options = {
        "q8_0": Options("q8_0", bounds=False),
        "q4_0": Options("q4_0", bounds=False),
        "no-mtp": Options("q8_0", bounds=False, mtp=False),
    }
    return {name: quantize_file(tiny_bf16, folder / f"{name}.gguf", chosen).path for name, chosen in options.items()}


def test_model_id_is_the_same_for_every_quantization(tiny_bf16: Path, quantized: dict[str, Path]) -> None:
    assert {model_id(read_gguf(path)) for path in (tiny_bf16, *quantized.values())} == {model_id(read_gguf(tiny_bf16))}
    assert len({file_sha256(read_gguf(path)) for path in (tiny_bf16, *quantized.values())}) == 4


def test_model_id_and_file_sha256_as_documented(tiny_bf16: Path) -> None:
    """Both from the file's bytes, without our own code."""
    file, data = read_gguf(tiny_bf16), tiny_bf16.read_bytes()
    norms = sorted((info.name, info) for info in file.tensors if info.name.endswith("_norm.weight") and not info.name.startswith("blk.4."))
    assert norms
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + data[info.offset : info.offset + info.nbytes] for name, info in norms))
    assert model_id(file) == digest.hexdigest()
    first, last = file.tensors[0].name.encode(), file.tensors[-1].name.encode()
    start = data.index(struct.pack("<Q", len(first)) + first)
    end = data.index(struct.pack("<Q", len(last)) + last, start) + 8 + len(last) + 4 + 8 * len(file.tensors[-1].shape) + 4 + 8
    assert file_sha256(file) == hashlib.sha256(data[start:end]).hexdigest()


def test_another_model_is_refused_another_quantization_is_a_note(tiny_bf16: Path, quantized: dict[str, Path], tmp_path: Path) -> None:
    file = read_gguf(quantized["q8_0"])
    header = replace(HEADER, model_id=model_id(file), file_sha256=file_sha256(file))
    path = tmp_path / "clip_bounds.bin"
    assert check_model(Bounds(header, ()), file, path) == ""
    assert "another quantization" in check_model(Bounds(header, ()), read_gguf(quantized["q4_0"]), path)
    changed = tmp_path / "changed.gguf"
    shutil.copy(tiny_bf16, changed)
    norm = next(info for info in file.tensors if info.name == "output_norm.weight")
    with changed.open("r+b") as out:
        out.seek(next(info.offset for info in read_gguf(changed).tensors if info.name == norm.name))
        out.write(b"\1")
    with pytest.raises(BadInput, match="measured on another model: Modell ß"):
        check_model(Bounds(header, ()), read_gguf(changed), path)


def test_quantize_measures_its_output(tiny_bf16: Path, tmp_path: Path) -> None:
    done = a3b("quantize", tiny_bf16, "--type", "q8_0", "-o", "out.gguf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip_bounds.bin", "out.gguf"]
    found = read_bounds(tmp_path / "clip_bounds.bin")
    assert check_model(found, read_gguf(tmp_path / "out.gguf"), tmp_path) == ""
    assert found.records == measure(tmp_path / "out.gguf").records
    assert "wrote clip_bounds.bin" in done.stdout


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.write(2, b'a.c: GGML_ASSERT(x)\\ntrace'); os.abort()", "was ended by SIGABRT: a.c: GGML_ASSERT(x)"),
        ("raise SystemExit('no such node')", "ended with exit code 1: no such node"),
        ("import sys; sys.exit(3)", "ended with exit code 3: it said nothing"),
    ],
)  # fmt: skip
def test_a_child_that_dies_leaves_the_file(quantized: dict[str, Path], code: str, said: str) -> None:
    before = quantized["q8_0"].read_bytes()
    measured = measure_bounds(quantized["q8_0"], child(code))
    assert measured.path is None
    assert said in measured.notes[0]
    assert quantized["q8_0"].read_bytes() == before
    assert not (quantized["q8_0"].parent / "clip_bounds.bin").exists()


def test_dying_for_real(tmp_path: Path, tiny_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp refuses a model without its norms; the quantized file stays, and llama.cpp's reason is told."""
    source = write_arrays(tmp_path / "odd.gguf", {"blk.0.attn_q.weight": np.ones((64, 64), np.float32)})
    done = a3b("quantize", source, "--type", "q8_0", "-o", "out.gguf", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "out.gguf").exists()
    assert "no clip_bounds.bin was written: the measuring run ended with exit code 3: llama.cpp cannot load" in done.stderr


def test_a_model_that_does_not_fit(quantized: dict[str, Path]) -> None:
    model = quantized["q8_0"]
    free = model.stat().st_size + MARGIN
    measured = measure_bounds(model, child("raise SystemExit(1)"), lambda: free - 1)
    assert measured.path is None
    assert f"`a3b calibrate {model}`" in measured.notes[0]
    assert "exit code 1" in measure_bounds(model, child("raise SystemExit(1)"), lambda: free).notes[0]


def test_an_older_file_of_another_model_is_mentioned(quantized: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copy(quantized["q8_0"], tmp_path / "model.gguf"))
    old = tmp_path / "clip_bounds.bin"
    write_bounds(old, HEADER, RECORDS)
    failed = measure_bounds(model, child("raise SystemExit(1)"))
    assert "the one that stands there is older" in failed.notes[1]
    assert read_bounds(old).header == HEADER
    done = measure_bounds(model)
    assert done.path == old
    assert "an older file was replaced" in done.notes[0]
    assert "Modell ß" in done.notes[0]
    assert measure_bounds(model).notes == ()
    assert flow.CHILD[1:] == ("-m", "a3b_quantize.measure")


def test_ranges_of_a_longer_text_are_kept(quantized: dict[str, Path], tmp_path: Path) -> None:
    """What `a3b calibrate` wrote into the same folder is not replaced by a short look at another quantization."""
    model = Path(shutil.copy(quantized["q8_0"], tmp_path / "model.gguf"))
    path = tmp_path / "clip_bounds.bin"
    header = replace(HEADER, model_id=model_id(read_gguf(model)), tokens=513)
    write_bounds(path, header, RECORDS)
    measured = measure_bounds(model, child("raise SystemExit(1)"))
    assert measured.path == path
    assert measured.notes == (f"{path} was kept: it was measured on 513 tokens, this run would use 512",)
    write_bounds(path, replace(header, tokens=512), RECORDS)
    assert measure_bounds(model, child("raise SystemExit(1)")).path is None
