"""Models in several files: written as llama.cpp and gguf-py read them, read like the one file that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from a3b_convert import convert, prepare
from a3b_gguf.errors import BadInput, Interrupted, UsageError
from a3b_gguf.flows.inspect import differences, summarise
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.flows.quantize import Options, plan_quantize, quantize_file
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import lay_out
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.metadata import Field, array
from a3b_gguf.tensors import TYPES, TensorJob, n_rows
from a3b_quantize.bounds import model_id
from command import assert_refused
from inside import inside as a3b

MAX = 8_000_000


@pytest.fixture(scope="module")
def split(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in bf16, 25 MB, in files of 8 MB at most: the first of them."""
    return convert(tiny_checkpoint, tmp_path_factory.mktemp("split") / "tiny.gguf", max_shard_bytes=MAX).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_keys_and_sizes(split: Path, tiny_checkpoint: Path, tiny_bf16: Path) -> None:
    parts = sorted(split.parent.iterdir())
    count = len(parts)
    assert count > 3
    assert [path.name for path in parts] == [f"tiny-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    assert all(path.stat().st_size <= MAX for path in parts)
    whole = read_gguf(tiny_bf16, arrays=True)
    for number, path in enumerate(parts):
        metadata = read_gguf(path, arrays=True).metadata
        own = {
            "split.no": Field("u16", number),
            "split.count": Field("u16", count),
            "split.tensors.count": Field("i32", len(whole.tensors)),
        }
        assert metadata == ({**whole.metadata, **own} if number == 0 else own)
    facts = prepare(tiny_checkpoint, split.parent / "tiny.gguf", max_shard_bytes=MAX)
    assert [(file.path, file.n_bytes) for file in facts.files] == [(path, path.stat().st_size) for path in parts]
    assert facts.n_bytes == sum(path.stat().st_size for path in parts)


def test_gguf_py_reads_every_tensor(split: Path, tiny_bf16: Path) -> None:
    theirs = {
        tensor.name: (tensor.tensor_type, tensor.data.tobytes())
        for path in sorted(split.parent.iterdir())
        for tensor in gguf.GGUFReader(path).tensors
    }
    assert theirs == {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in gguf.GGUFReader(tiny_bf16).tensors}


def test_llama_cpp_loads_it(split: Path) -> None:
    params = LoadParams(n_ctx=64)
    with load_model(split, params) as model:
        assert Vocab(model).n_tokens == read_gguf(split).metadata["tokenizer.ggml.tokens"].value.count


def test_it_is_read_like_the_one_file(split: Path, tiny_bf16: Path, tmp_path: Path) -> None:
    ours, one = open_gguf_model(split), open_gguf_model(tiny_bf16)
    assert ours.metadata == one.metadata
    for a, b in zip(ours.tensors, one.tensors, strict=True):
        assert (a.name, a.shape, a.type, bytes(a.raw(0, n_rows(a.shape)))) == (b.name, b.shape, b.type, bytes(b.raw(0, n_rows(b.shape))))
    assert differences(split, tiny_bf16) == ()
    summary, expected = summarise(split), summarise(tiny_bf16)
    assert (summary.roles, summary.n_weights, summary.n_tensors) == (expected.roles, expected.n_weights, expected.n_tensors)
    assert summary.n_bytes == sum(path.stat().st_size for path in split.parent.iterdir())
    assert read_facts(split).weight_bytes == read_facts(tiny_bf16).weight_bytes
    assert model_id(read_gguf(split)) == model_id(read_gguf(tiny_bf16))


@pytest.mark.parametrize("from_parts", [True, False])
def test_quantize_reads_and_writes_parts(split: Path, tiny_bf16: Path, tmp_path: Path, from_parts: bool) -> None:
    whole = quantize_file(tiny_bf16, tmp_path / "whole.gguf", Options("q8_0", bounds=False)).path
    options = Options("q8_0", max_shard_bytes=3_000_000)
    planned = plan_quantize(split, tmp_path / "x" / "q.gguf", options)
    (tmp_path / "x").mkdir()
    done = quantize_file(split if from_parts else tiny_bf16, tmp_path / "x" / "q.gguf", options)
    assert planned.files == done.files
    assert [file.n_bytes for file in done.files] == [file.path.stat().st_size for file in done.files]
    assert differences(done.path, whole) == ()
    ours, one = open_gguf_model(done.path), open_gguf_model(whole)
    assert all(bytes(a.raw(0, n_rows(a.shape))) == bytes(b.raw(0, n_rows(b.shape))) for a, b in zip(ours.tensors, one.tensors, strict=True))
    assert done.bounds == tmp_path / "x" / "clip_bounds.bin"  # measured over all parts


def test_too_small_a_limit_gives_each_tensor_a_file(tmp_path: Path) -> None:
    jobs = [TensorJob(name, (64,), TYPES["f32"], lambda: iter([bytes(256)])) for name in "abc"]
    metadata = {"big": array("i32", range(1000))}
    files = lay_out(tmp_path / "m.gguf", metadata, jobs, 10)
    assert [len(file.jobs) for file in files] == [1, 1, 1]
    (one,) = lay_out(tmp_path / "m.gguf", metadata, jobs, 100_000)
    assert one.path.name == "m.gguf"
    assert b"split." not in one.start
    exact = sum(file.n_bytes for file in lay_out(tmp_path / "m.gguf", metadata, jobs[:2]))
    for limit in range(exact - 400, exact + 400, 8):
        found = lay_out(tmp_path / "m.gguf", metadata, jobs, limit)
        assert all(file.n_bytes <= limit or len(file.jobs) == 1 for file in found)


def test_too_many_files(tmp_path: Path) -> None:
    jobs = [TensorJob(f"t{i}", (1,), TYPES["f32"], lambda: iter([bytes(4)])) for i in range(65_536)]
    with pytest.raises(UsageError, match=r"65,536 files, at most 65,535"):
        lay_out(tmp_path / "m.gguf", {}, jobs, 1)


Break = Callable[[Path, Path], object]


def renumbered(first: Path, second: Path) -> None:
    third = second.with_name(second.name.replace("-00002-", "-00003-"))
    shutil.copyfile(third, second)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda first, second: second.unlink(), r"tiny-00002-of-0000\d\.gguf is missing: part 2 of \d"),
        (renumbered, r"tiny-00002-of-0000\d\.gguf says that it is part 3"),
        (lambda first, second: second.write_bytes(second.read_bytes()[:-1]), r"tiny-00002-of-0000\d\.gguf is cut off"),
        (lambda first, second: first.rename(first.with_name("tiny.gguf")), "its name does not say which"),
    ],
)
def test_broken_sets(split: Path, tmp_path: Path, break_it: Break, said: str) -> None:
    folder = shutil.copytree(split.parent, tmp_path / "set")
    first, second = sorted(folder.iterdir())[:2]
    break_it(first, second)
    given = first if first.exists() else folder / "tiny.gguf"
    for read in (open_gguf_model, summarise, read_facts, lambda path: quantize_file(path, tmp_path / "q.gguf", Options("q8_0"))):
        with pytest.raises(BadInput, match=said):
            read(given)
    assert not (tmp_path / "q.gguf").exists()


def test_parts_of_two_models(tmp_path: Path) -> None:
    jobs = [TensorJob(name, (64,), TYPES["f32"], lambda: iter([bytes(256)])) for name in "ab"]
    for name, group in (("a", jobs), ("b", jobs[::-1])):
        for file in lay_out(tmp_path / f"{name}.gguf", {}, group, 10):
            file.path.write_bytes(file.start.ljust(file.n_bytes, b"\0"))
    (tmp_path / "b-00002-of-00002.gguf").replace(tmp_path / "a-00002-of-00002.gguf")
    with pytest.raises(BadInput, match=r"tensor a is in .*a-00001-of-00002.gguf and in .*a-00002"):
        open_gguf_model(tmp_path / "a-00001-of-00002.gguf")


def test_a_part_that_is_not_the_first_names_the_first(split: Path) -> None:
    second = sorted(split.parent.iterdir())[1]
    for words in (("inspect", second), ("quantize", second, "--type", "q8_0"), ("plan", second, "--vram", "8GiB", "--ram", "8GiB")):
        assert_refused(a3b(*words), 3, "is part 2 of", split.name)


def test_no_part_gets_its_name_before_all_are_whole(tiny_checkpoint: Path, split: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def stop_at_the_end(done: int, total: int, name: str) -> None:
        if done > 0.9 * total:
            seen.append(names(tmp_path))
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"tiny-00001-of-\d{5}\.gguf\.part and \d more: the same command continues there"):
        convert(tiny_checkpoint, tmp_path / "tiny.gguf", max_shard_bytes=MAX, progress=stop_at_the_end)
    assert all(name.endswith(".gguf.part") for name in seen[0])
    assert "continued after" in " ".join(convert(tiny_checkpoint, tmp_path / "tiny.gguf", max_shard_bytes=MAX).notes)
    assert names(tmp_path) == names(split.parent)
    for name in names(tmp_path):
        assert (tmp_path / name).read_bytes() == (split.parent / name).read_bytes()


def test_the_output_cannot_be_a_part_of_the_input(split: Path) -> None:
    with pytest.raises(UsageError, match="is the input"):
        quantize_file(split, split.with_name("tiny.gguf"), Options("bf16", bounds=False, max_shard_bytes=MAX))


def test_the_flag(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    dry = json.loads(a3b("convert", tiny_checkpoint, "-o", out, "--max-shard-size", "8M", "--dry-run", "--json").stdout)
    done = a3b("convert", tiny_checkpoint, "-o", out, "--max-shard-size", "8M")
    listed = re.findall(r"^  (\S+): ([\d,]+) bytes$", done.stdout, re.M)
    assert [(name, int(size.replace(",", ""))) for name, size in listed] == [(file["path"], file["n_bytes"]) for file in dry["files"]]
    assert {file["path"]: file["n_bytes"] for file in dry["files"]} == {str(path): path.stat().st_size for path in tmp_path.iterdir()}
    assert_refused(a3b("convert", tiny_checkpoint, "-o", out, "--max-shard-size", "big"), 2, "--max-shard-size: 'big' is not a size")
    assert_refused(a3b("quantize", tiny_checkpoint, "--type", "q8_0", "--max-shard-size", "0"), 2, "--max-shard-size")
