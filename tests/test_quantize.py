"""`a3b quantize`: what it writes, what it refuses, and that neither threads nor memory show."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_convert import convert
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.bounds import Measured
from a3b_gguf.flows.quantize import Options, default_output, plan_quantize, quantize_file
from a3b_gguf.flows.weight_rate import WeightRate
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model, to_float32
from a3b_gguf.llama.batch import Batch, decode, logits
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.metadata import Field
from a3b_gguf.tensors import TYPES, GGMLType, Model, n_rows
from a3b_quantize.assign import Assignment
from a3b_quantize.encode import Encoding, jobs
from a3b_quantize.pipeline import CHUNK_WEIGHTS
from a3b_quantize.policy import find_policy, plain_assignments
from command import assert_refused
from inside import inside as a3b
from llama_quantize import llama_quantize
from small_gguf import llama_metadata, narrow, write_arrays


def quiet(name: str, **more: object) -> Options:
    return Options(name, bounds=False, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def narrow_bf16(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Path:
    return narrow(tiny_bf16, tmp_path_factory.mktemp("narrow") / "narrow-bf16.gguf")


def tensor_bytes(path: Path) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.raw(0, n_rows(tensor.shape))) for tensor in open_gguf_model(path).tensors}


@pytest.mark.parametrize("name", ["iq4_nl", "q4_k_m"])
def test_ours_loads_and_speaks(tiny_bf16: Path, tmp_path: Path, name: str) -> None:
    """The file loads in llama.cpp, and its most likely next tokens are mostly those of the source."""
    done = quantize_file(tiny_bf16, tmp_path / "out.gguf", quiet(name))
    assert done.nbytes == done.path.stat().st_size
    text = "<|im_start|>user\nWhat is the capital of Chile?<|im_end|>\n<|im_start|>assistant\n"
    (ours, logits), (theirs, _) = generate(done.path, text), generate(tiny_bf16, text)
    assert np.isfinite(logits).all()
    assert len(ours) == 24
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 6  # greedy answers part at the first close call


def generate(path: Path, text: str, count: int = 24) -> tuple[list[int], NDArray[np.float32]]:
    """`count` greedy tokens after `text`, and the last logits."""
    params = LoadParams(n_ctx=256)
    with load_model(path, params) as model, open_context(model, params) as context:
        vocab = Vocab(model)
        tokens, said = vocab.tokenize(text, parse_special=True), list[int]()
        batch = Batch(params.n_batch)
        position = 0
        while len(said) < count:
            batch.clear()
            row = batch.add(0, position, tokens, 1)
            assert decode(context, batch) == 0
            position += len(tokens)
            last = logits(context, row, vocab.n_tokens).copy()
            tokens = [int(last.argmax())]
            said += tokens
        return said, last


def test_metadata_keeps_its_order(narrow_bf16: Path, tmp_path: Path) -> None:
    quantize_file(narrow_bf16, tmp_path / "out.gguf", quiet("iq4_nl"))
    before, after = read_gguf(narrow_bf16, arrays=True), read_gguf(tmp_path / "out.gguf", arrays=True)
    assert list(after.metadata) == [*before.metadata, "a3b.recipe"]
    changed = {key for key in before.metadata if before.metadata[key] != after.metadata[key]}
    assert changed == {"general.file_type"}
    assert (after.get("general.file_type"), after.get("general.quantization_version"), after.get("a3b.recipe")) == (25, 2, "iq4_nl")
    assert [info.name for info in after.tensors] == [info.name for info in before.tensors]


@pytest.mark.parametrize("name", ["q8_0", "q6_k", "q4_0", "iq4_xs", "f16", "q4_k"])
def test_a_pure_type_is_llama_quantizes_pure(narrow_bf16: Path, tmp_path: Path, name: str) -> None:
    policy = find_policy(name, pure=True)
    assert policy.file_type is not None
    theirs = llama_quantize(narrow_bf16, tmp_path / "theirs.gguf", policy.file_type, pure=True)
    done = quantize_file(narrow_bf16, tmp_path / "ours.gguf", quiet(name, kernel="ggml", pure=True))
    assert tensor_bytes(done.path) == tensor_bytes(theirs)
    assert read_gguf(theirs).get("general.file_type") == read_gguf(done.path).get("general.file_type")


def test_threads_do_not_change_the_bytes(tiny_bf16: Path, tmp_path: Path) -> None:
    files = [quantize_file(tiny_bf16, tmp_path / f"{n}.gguf", quiet("q8_0", threads=n)).path.read_bytes() for n in (1, 2, 5)]
    assert files[0] == files[1] == files[2]


def test_exact_size_without_writing(tiny_bf16: Path, tmp_path: Path) -> None:
    planned = plan_quantize(tiny_bf16, tmp_path / "out.gguf", quiet("q4_k_m"))
    assert not planned.written
    assert list(tmp_path.iterdir()) == []
    assert planned.nbytes == quantize_file(tiny_bf16, tmp_path / "out.gguf", quiet("q4_k_m")).path.stat().st_size
    assert sum(share.nbytes for share in planned.shares) == sum(info.nbytes for info in read_gguf(tmp_path / "out.gguf").tensors)


def test_without_the_mtp_block(narrow_bf16: Path, tmp_path: Path) -> None:
    done = quantize_file(narrow_bf16, tmp_path / "out.gguf", quiet("q8_0", mtp=False))
    file = read_gguf(done.path)
    assert not any(info.name.startswith("blk.4.") for info in file.tensors)
    assert file.hparam("block_count") == 4
    assert file.hparam("nextn_predict_layers") is None
    assert file.hparam("attention.recurrent_layers") == [True, True, True, False]
    assert file.hparam("rope.dimension_sections") == [3, 3, 2, 0]
    assert any("MTP" in note for note in done.notes)


def test_no_mtp_where_there_is_none(tmp_path: Path) -> None:
    source = write_arrays(tmp_path / "dense.gguf", {"blk.0.attn_q.weight": np.ones((32, 64), np.float32)})
    done = plan_quantize(source, tmp_path / "out.gguf", quiet("q8_0", mtp=False))
    assert done.notes == ("--no-mtp: the model has no MTP block",)


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "q8_0"), (np.inf, "iq4_nl"), (-np.inf, "f32"), (np.nan, "f16")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, kind: str) -> None:
    values = np.zeros((4, 300, 64), np.float32)
    values[2, 123, 7] = value
    source = write_arrays(tmp_path / "bad.gguf", {"blk.0.ffn_up_exps.weight": values})
    with pytest.raises(BadInput) as caught:
        quantize_file(source, tmp_path / "out.gguf", quiet(kind))
    assert "blk.0.ffn_up_exps.weight, expert 2 of 4, row 123, column 7" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_sum_that_overflows_is_not_a_bad_weight(tmp_path: Path) -> None:
    source = write_arrays(tmp_path / "large.gguf", {"blk.0.attn_q.weight": np.full((32, 64), 3e38, np.float32)})
    assert quantize_file(source, tmp_path / "out.gguf", quiet("f32")).written


def test_a_value_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    values = np.ones((40, 64), np.float32)
    values[33, 5] = 1e9
    source = write_arrays(tmp_path / "wide.gguf", {"blk.0.attn_q.weight": values})
    with pytest.raises(BadInput, match=r"blk\.0\.attn_q\.weight, row 33: q8_0 cannot hold its values, the largest is 1e\+09"):
        quantize_file(source, tmp_path / "out.gguf", quiet("q8_0"))


def test_rows_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    arrays = {"blk.0.ffn_up.weight": np.ones((4, 320), np.float32), "blk.0.ffn_gate.weight": np.ones((4, 80), np.float32)}
    done = quantize_file(write_arrays(tmp_path / "odd.gguf", arrays), tmp_path / "out.gguf", quiet("q4_k_m"))
    assert {each.name: each.type.name for each in done.fell_back} == {"blk.0.ffn_up.weight": "q5_0", "blk.0.ffn_gate.weight": "f16"}
    text = a3b("quantize", tmp_path / "odd.gguf", "--type", "q4_k_m", "--no-bounds", cwd=tmp_path)
    assert "rows of 80 do not fit q4_k blocks of 256, so f16" in text.stderr


def test_a_quantized_source_is_refused(narrow_bf16: Path, tmp_path: Path) -> None:
    first = quantize_file(narrow_bf16, tmp_path / "first.gguf", quiet("q8_0")).path
    with pytest.raises(BadInput, match=r"tensor token_embd\.weight is q8_0: the source is quantized already"):
        quantize_file(first, tmp_path / "second.gguf", quiet("q8_0"))


def test_a_part_that_is_not_the_first_is_refused(tmp_path: Path) -> None:
    split = {**llama_metadata(), "split.no": Field("u16", 1), "split.count": Field("u16", 3)}
    source = write_arrays(tmp_path / "a-00002-of-00003.gguf", {"output.weight": np.ones((2, 32), np.float32)}, split)
    with pytest.raises(BadInput, match="part 2 of 3"):
        plan_quantize(source, tmp_path / "out.gguf", quiet("q8_0"))


def test_a_source_with_another_alignment(tmp_path: Path) -> None:
    """general.alignment says how that file was laid out, not the one that is written."""
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(256)
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    for name in ("blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = quantize_file(tmp_path / "wide.gguf", tmp_path / "out.gguf", quiet("f32"))
    for tensor in gguf.GGUFReader(done.path).tensors:
        np.testing.assert_array_equal(tensor.data, values)


def test_tables_of_ids_and_double_precision(tmp_path: Path) -> None:
    """An i32 tensor is no weight that lost something: it is copied. f64 is read as f32."""
    values = np.random.default_rng(0).standard_normal((8, 64))
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor("blk.0.ffn_gate_tid2eid.weight", np.arange(64, dtype=np.int32).reshape(2, 32))
    writer.add_tensor("blk.0.ffn_up.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    single = write_arrays(tmp_path / "f32.gguf", {"blk.0.ffn_up.weight": values.astype(np.float32)})
    found = tensor_bytes(quantize_file(tmp_path / "odd.gguf", tmp_path / "out.gguf", quiet("iq4_nl")).path)
    assert found["blk.0.ffn_gate_tid2eid.weight"] == np.arange(64, dtype=np.int32).tobytes()
    assert (
        found["blk.0.ffn_up.weight"]
        == tensor_bytes(quantize_file(single, tmp_path / "out2.gguf", quiet("iq4_nl")).path)["blk.0.ffn_up.weight"]
    )


def test_f16_and_f32_sources_give_the_same(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float16).astype(np.float32)
    files = [
        quantize_file(
            write_arrays(tmp_path / f"{kind}.gguf", {"blk.0.ffn_up.weight": values}, kind=kind),
            tmp_path / f"{kind}-out.gguf",
            quiet("iq4_nl"),
        )
        for kind in ("f16", "f32")
    ]
    assert tensor_bytes(files[0].path) == tensor_bytes(files[1].path)


class Endless:
    """A TensorSource of any size that holds nothing."""

    def __init__(self, shape: tuple[int, ...], kind: GGMLType = TYPES["f32"]) -> None:
        self.name, self.shape, self.type = "blk.0.ffn_up_exps.weight", shape, kind

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.ones((stop - start, self.shape[-1]), np.float32)

    def raw(self, start: int, stop: int) -> bytes:
        return bytes(4 * (stop - start) * self.shape[-1])


def encoded(source: Endless, kind: str, threads: int) -> Iterator[bytes | memoryview]:
    model = Model(llama_metadata(), (source,))
    return jobs(model, plain_assignments(model, TYPES[kind]), Encoding(threads=threads))[0].chunks()


def test_memory_stays_bounded() -> None:
    """A tensor of 1 GiB in float32 passes through two threads in a few chunks."""
    source = Endless((256, 1024, 1024))
    tracemalloc.start()
    try:
        total = sum(len(chunk) for chunk in encoded(source, "q8_0", 2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == TYPES["q8_0"].nbytes(source.shape)
    assert peak < 12 * 4 * CHUNK_WEIGHTS


def test_blocks_mean_what_the_source_says(narrow_bf16: Path, tmp_path: Path) -> None:
    done = quantize_file(narrow_bf16, tmp_path / "out.gguf", quiet("q8_0"))
    before = {tensor.name: tensor for tensor in open_gguf_model(narrow_bf16).tensors}
    for tensor in open_gguf_model(done.path).tensors:
        source = before[tensor.name]
        decoded = to_float32(tensor.raw(0, n_rows(tensor.shape)), tensor.type)
        exact = source.rows(0, n_rows(source.shape)).reshape(-1)
        assert np.abs(decoded - exact).max() <= np.abs(exact).max() / 120, tensor.name


@pytest.mark.parametrize("mtp", [True, False])
def test_one_pass_gives_the_bytes_of_two(tiny_checkpoint: Path, tmp_path: Path, mtp: bool) -> None:
    convert(tiny_checkpoint, tmp_path / "float.gguf", mtp=mtp)
    one = quantize_file(tiny_checkpoint, tmp_path / "one.gguf", quiet("q8_0", mtp=mtp))
    two = quantize_file(tmp_path / "float.gguf", tmp_path / "two.gguf", quiet("q8_0"))
    assert one.path.read_bytes() == two.path.read_bytes()


def test_default_names(tiny_checkpoint: Path) -> None:
    assert default_output(Path("x/tiny-bf16.gguf"), find_policy("iq4_nl")) == Path("tiny-IQ4_NL.gguf")
    assert default_output(Path("x/Model-F32.gguf"), find_policy("q5_k_m", stock=True)) == Path("Model-Q5_K_M.gguf")
    assert default_output(Path("x/Model-bf16-00001-of-00003.gguf"), find_policy("q8_0")) == Path("Model-Q8_0.gguf")
    assert default_output(Path("x/Model-bf16-00001-of-00003.gguf"), find_policy("copy")) == Path("Model-bf16-copy.gguf")
    assert default_output(tiny_checkpoint, find_policy("q8_0")) == Path("tiny-a3b-Q8_0.gguf")


def test_usage_errors_come_before_any_work(narrow_bf16: Path, tmp_path: Path) -> None:
    for options, said in (
        (quiet("iq4_ln"), "did you mean iq4_nl"),
        (quiet("q8_0", kernel="fastest"), "--kernel"),
        (quiet("q8_0", threads=0), "--threads"),
        (quiet("iq2_xxs"), "importance matrix"),
    ):
        with pytest.raises(UsageError, match=said):
            quantize_file(narrow_bf16, tmp_path / "out.gguf", options)
    with pytest.raises(UsageError, match="is a folder"):
        quantize_file(narrow_bf16, tmp_path, quiet("q8_0"))
    with pytest.raises(UsageError, match="get that name"):
        quantize_file(narrow_bf16, tmp_path / "clip_bounds.bin", quiet("q8_0"))
    assert list(tmp_path.iterdir()) == []


def test_measuring_gets_the_file_and_its_notes_come_back(narrow_bf16: Path, tmp_path: Path) -> None:
    asked: list[Path] = []

    def measure(path: Path) -> Measured:
        asked.append(path)
        return Measured(None, ("it rained",))

    done = quantize_file(narrow_bf16, tmp_path / "out.gguf", Options("q8_0"), measure=measure)
    assert asked == [done.path]
    assert done.notes == ("it rained",)


def test_on_the_command_line(narrow_bf16: Path, tmp_path: Path) -> None:
    done = a3b("quantize", narrow_bf16, "--type", "iq4_nl", "--no-bounds", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["narrow-IQ4_NL.gguf"]
    assert "wrote narrow-IQ4_NL.gguf" in done.stdout
    assert "100 %" in done.stderr
    said = a3b("quantize", narrow_bf16, "--type", "iq4_nl", "--dry-run", "--json", cwd=tmp_path)
    planned = json.loads(said.stdout)
    assert planned["nbytes"] == (tmp_path / "narrow-IQ4_NL.gguf").stat().st_size
    assert {row["role"] for row in planned["shares"]} >= {"expert_down", "deltanet", "router"}


def test_refusals_on_the_command_line(narrow_bf16: Path, tmp_path: Path) -> None:
    assert_refused(
        a3b("quantize", narrow_bf16, "--type", "iq4nl"), 2, "did you mean iq4_nl?", "recipes: iq4_nl, iq4_xs, mxfp4_moe", "what to do"
    )
    assert_refused(a3b("quantize", narrow_bf16), 2, "--type or --policy is missing", "recipes: ")
    assert_refused(a3b("quantize", tmp_path / "missing.gguf", "--type", "q8_0"), 3, "missing.gguf does not exist")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(narrow_bf16.read_bytes()[:-5000])
    assert_refused(a3b("quantize", cut, "--type", "q8_0", cwd=tmp_path), 3, "cut off")
    assert_refused(a3b("quantize", tmp_path, "--type", "q8_0"), 3, str(tmp_path))
    same = tmp_path / "same.gguf"
    same.write_bytes(narrow_bf16.read_bytes())
    assert_refused(a3b("quantize", same, "--type", "q8_0", "-o", same), 2, "is the input")
    assert_refused(a3b("quantize", same, "--type", "q8_0", "-o", tmp_path / "no" / "out.gguf"), 2, "must exist")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "same.gguf"]
    assert same.read_bytes() == narrow_bf16.read_bytes()


def test_progress_tells_weights_a_second() -> None:
    """4 and 8 million weights in different types, at the same pace."""
    kinds = TYPES["q8_0"], TYPES["iq4_nl"]
    assignments = [
        Assignment(name, (rows, 1024), TYPES["f32"], kind, "attention", "")
        for name, rows, kind in (("a", 4000, kinds[0]), ("b", 8000, kinds[1]))
    ]
    told: list[tuple[int, int, str]] = []
    times = iter((10.0, 12.0, 12.0, 16.0))
    rate = WeightRate(lambda *said: told.append(said), assignments, lambda: next(times))
    a, b = (each.nbytes for each in assignments)
    rate(0, a + b, "header")
    rate(0, a + b, "a")
    rate(a, a + b, "a")
    rate(a, a + b, "b")
    rate(a + b, a + b, "b")
    assert [name for _, _, name in told] == ["header", "a", "2.0 M weights/s, a", "2.0 M weights/s, b", "2.0 M weights/s, b"]
    assert [done for done, _, _ in told] == [0, 0, a, a, a + b]
