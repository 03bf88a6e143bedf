"""a3b eval: llama-perplexity's numbers, the file that keeps what a base said, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.errors import A3BError, BadInput, UsageError
from a3b_gguf.flows.card import copy_job
from a3b_gguf.flows.evaluate import CACHE_SUFFIX, EvalOptions, Evaluation, evaluate_file, read_text, trim
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_quantize.evaluate import chunked
from command import a3b, assert_refused
from golden_files import GOLDEN
from inside import inside
from llama_quantize import llama_quantize
from small_gguf import write_arrays

TEXT = GOLDEN / "eval" / "chats.txt"
PRINTED = json.loads((GOLDEN / "eval" / "llama_perplexity.json").read_text(encoding="utf-8"))
IQ4_NL = 25


@contextmanager
def silent(what: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


@pytest.fixture(scope="module")
def iq4_nl(tiny_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-quantize's own IQ4_NL of the embedded model."""
    return llama_quantize(tiny_bf16, tmp_path_factory.mktemp("eval") / "iq4_nl.gguf", IQ4_NL)


@pytest.fixture(scope="module")
def compared(tiny_bf16: Path, iq4_nl: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    options = EvalOptions(base=tiny_bf16, data=TEXT, cache=tmp_path_factory.mktemp("cache"), threads=1)
    return evaluate_file(iq4_nl, options, silent)


def test_kl_divergence_equals_llama_perplexitys(compared: Evaluation) -> None:
    scores = compared.scores
    assert scores.divergence is not None
    assert (scores.n_chunk, scores.n_ctx, scores.n_scored) == (12, 512, 12 * 255)
    found = {name: getattr(scores if name == "perplexity" else scores.divergence, name) for name in PRINTED["iq4_nl"]}
    for name, (value, *stderr) in PRINTED["iq4_nl"].items():
        # 0.5 %, or half of the last digit that it prints
        assert found[name].value == pytest.approx(value, rel=5e-3, abs=2e-6 if name.startswith("kl") else 5e-4), name
        if stderr:
            assert found[name].stderr == pytest.approx(stderr[0], rel=0.02, abs=1e-3), name
    assert scores.divergence.base_perplexity.value == pytest.approx(PRINTED["perplexity"]["ctx 512"][0], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "change"),
    [("ctx 200", {"n_ctx": 200}), ("kv q8_0", {"kv_type": "q8_0"}), ("1 expert", {"n_expert_used": 1})],
)
def test_perplexity_equals_llama_perplexitys(tiny_bf16: Path, case: str, change: dict[str, object]) -> None:
    found = evaluate_file(tiny_bf16, replace(EvalOptions(data=TEXT, threads=1), **change), silent).scores  # type: ignore[arg-type]
    value, stderr = PRINTED["perplexity"][case]
    assert found.perplexity.value == pytest.approx(value, rel=1e-3)
    assert found.perplexity.stderr == pytest.approx(stderr, rel=1e-2)
    assert found.divergence is None


def test_experts_and_kv_type_make_a_difference() -> None:
    """The goldens above would not notice a flag that is ignored if these were equal."""
    values = [PRINTED["perplexity"][case][0] for case in ("ctx 512", "kv q8_0", "1 expert")]
    assert all(abs(a / b - 1) > 1e-4 for i, a in enumerate(values) for b in values[:i])


def test_a_model_against_itself_does_not_differ(tiny_bf16: Path, tmp_path: Path) -> None:
    found = evaluate_file(tiny_bf16, EvalOptions(base=tiny_bf16, data=TEXT, n_chunk=2, cache=tmp_path, threads=1), silent)
    divergence = found.scores.divergence
    assert divergence is not None
    assert abs(divergence.kl_mean.value) < 1e-6
    assert divergence.same_top_percent.value == 100
    assert found.base_file is not None
    options = EvalOptions(base=tiny_bf16, data=TEXT, n_chunk=2, cache=tmp_path, threads=1, kv_type="f16/q4_0")
    other = evaluate_file(tiny_bf16, options, silent).scores.divergence
    assert other is not None
    assert other.kl_mean.value > 1e-6


def test_a_base_runs_once_and_a_damaged_file_of_it_is_refused(tiny_bf16: Path, iq4_nl: Path, tmp_path: Path) -> None:
    options = EvalOptions(base=tiny_bf16, data=TEXT, n_chunk=2, cache=tmp_path, threads=1)
    compared = evaluate_file(iq4_nl, options, silent)
    file = compared.base_file
    assert file is not None
    steps: list[str] = []

    @contextmanager
    def noted(what: str) -> Iterator[Callable[[int, int], None]]:
        steps.append(what)
        yield lambda done, total: None

    again = evaluate_file(iq4_nl, options, noted)
    assert steps == ["model"]
    assert again.scores == compared.scores
    assert "was not run" in again.notes[0]

    whole = file.read_bytes()
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    third = evaluate_file(iq4_nl, options, noted)
    assert steps == ["model", "base", "model"]
    assert "chunk 0 is damaged; the base was run again" in third.notes[0]
    assert third.scores == compared.scores
    assert file.read_bytes() == whole


def test_the_cache_stays_within_its_limit(tmp_path: Path) -> None:
    for number in range(3):
        path = tmp_path / f"{number}{CACHE_SUFFIX}"
        path.write_bytes(bytes(1000))
        os.utime(path, (number, number))
    assert len(trim(tmp_path, 3000)) == 0
    assert "0.a3bbase" in trim(tmp_path, 2500)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"1{CACHE_SUFFIX}", f"2{CACHE_SUFFIX}"]


def test_command_prints_a_table_and_json(tiny_bf16: Path, iq4_nl: Path, tmp_path: Path) -> None:
    words = ("eval", iq4_nl, "--base", tiny_bf16, "--data", TEXT, "--chunks", 2, "--threads", 1, "--cache", tmp_path)
    table = a3b(*words)
    assert table.returncode == 0, table.stderr
    for text in ("KL divergence, mean", "same top-1, %", "95 % interval", "2 chunks of 512 tokens, 510 scored", "tokens/s"):
        assert text in table.stdout
    assert "eval base: 50 %, 1 chunks" in table.stderr
    found = json.loads(inside(*words, "--json").stdout)
    assert found["scores"]["divergence"]["kl_mean"].keys() == {"value", "stderr", "low", "high"}
    assert found["base_file"].startswith(str(tmp_path))
    nothing = json.loads(inside(*words[:-2], "--no-cache", "--json").stdout)
    assert nothing["base_file"] is None
    assert nothing["scores"] == found["scores"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"n_ctx": 8}, UsageError, "8 tokens are too few"),
        ({"cache": Path(__file__)}, UsageError, "test_eval.py is a file, not a folder"),
        ({"n_ctx": 1_000_000}, UsageError, "more than the 262,144 that .* was trained for"),
        ({"n_ctx": 200_000}, UsageError, "1 chunks of 200,000 need 200,000"),
        ({"n_chunk": 0}, UsageError, "--chunks: 0"),
        ({"n_chunk": 9999}, UsageError, "9999 chunks of 512 need"),
        ({"kv_type": "q9"}, UsageError, "no KV cache type 'q9'"),
        ({"kv_type": "f16/q9"}, UsageError, "no KV cache type 'q9'"),
        ({"n_expert_used": 9}, UsageError, "9 of 8 experts"),
        ({"data": Path("absent.txt")}, BadInput, "absent.txt: No such file"),
        ({"base": Path("absent.gguf")}, BadInput, "absent.gguf"),
        ({"threads": 0}, UsageError, "--threads: 0"),
        ({"threads": 513}, UsageError, "--threads: 513"),
        ({"threads": 1 << 31}, UsageError, "--threads: 2147483648"),
        ({"kv_type": "f16/"}, UsageError, "no KV cache type ''"),
        ({"n_gpu_layers": -1}, UsageError, "--n-gpu-layers: -1"),
        ({"data": Path("/dev/null")}, BadInput, "/dev/null holds no text"),
    ],
)
def test_what_cannot_be_is_refused(tiny_bf16: Path, change: dict[str, object], error: type[A3BError], words: str) -> None:
    with pytest.raises(error, match=words):
        evaluate_file(tiny_bf16, replace(EvalOptions(threads=1), **change), silent)  # type: ignore[arg-type]


def test_flags_that_exclude_each_other(tiny_bf16: Path) -> None:
    assert_refused(inside("eval", tiny_bf16, "--cache", "x", "--no-cache"), 2, "exclude each other")
    assert_refused(inside("eval", tiny_bf16, "--experts", -1), 2, "cannot be negative")


def test_conversations_are_rendered_with_the_models_template(tiny_bf16: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "What is the capital of Chile?"}, {"role": "assistant", "content": "Santiago"}]}
    data.write_text("\n".join([json.dumps(chat)] * 20))
    text = read_text(EvalOptions(data=data), read_gguf(tiny_bf16))
    assert text.parse_special
    assert text.text.count("<|im_start|>assistant") == 20
    with LlamaLog(), load_model(tiny_bf16, LoadParams(n_ctx=128), vocab_only=True) as vocabulary:
        starts = Vocab(vocabulary).tokenize("<|im_start|>", parse_special=True)
        chunks = chunked(vocabulary, text, 128, None)
    assert len(starts) == 1
    assert (chunks == starts[0]).sum() > 10
    assert evaluate_file(tiny_bf16, EvalOptions(data=data, n_ctx=128, threads=1), silent).scores.n_chunk == len(chunks)


def test_files_that_cannot_be_evaluated(tiny_bf16: Path, tmp_path: Path) -> None:
    text = tmp_path / "model.gguf"
    text.write_text("no model at all, but long enough to be a header")
    assert_refused(inside("eval", text), 3, "is not a GGUF file")
    binary = tmp_path / "data.txt"
    binary.write_bytes(b"abc\xff")
    assert_refused(inside("eval", tiny_bf16, "--data", binary), 3, "byte 3 is not UTF-8")
    empty = write_arrays(tmp_path / "empty.gguf", {"output_norm.weight": np.ones(64, np.float32)})
    assert_refused(inside("eval", empty, "--base", tiny_bf16), 3, "tokenizer.ggml.tokens")


def test_a_base_with_another_vocabulary_is_refused(tiny_bf16: Path, tmp_path: Path) -> None:
    model = open_gguf_model(tiny_bf16)
    tokens = model.metadata["tokenizer.ggml.tokens"]
    changed = [*tokens.value[:700], "another", *tokens.value[701:]]
    other = tmp_path / "other.gguf"
    metadata = {**model.metadata, "tokenizer.ggml.tokens": replace(tokens, value=changed)}
    write_gguf(other, metadata, [copy_job(tensor) for tensor in model.tensors])
    assert_refused(inside("eval", tiny_bf16, "--base", other), 3, "token 700 is 'another'", "not of one model")


def test_results_travel_in_the_file_and_print_as_a_card(tiny_bf16: Path, iq4_nl: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(iq4_nl.read_bytes())
    assert_refused(inside("inspect", model, "--card"), 1, "carries no evaluation", "--embed")
    words = ("eval", model, "--base", tiny_bf16, "--data", TEXT, "--chunks", 2, "--threads", 1, "--cache", tmp_path, "--json")
    found = json.loads(inside(*words, "--embed", model).stdout)
    card = inside("inspect", model, "--card").stdout
    mean = found["scores"]["divergence"]["kl_mean"]
    assert f"| KL divergence, mean | {mean['value']:.6f} | {mean['low']:.6f} to {mean['high']:.6f} |" in card
    assert "| expert_gate | iq4_nl | 4 |" in card
    assert "against tiny-bf16.gguf on chats.txt" in card
    ours, theirs = open_gguf_model(model), open_gguf_model(iq4_nl)
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.raw(0, 1) == other.raw(0, 1)
    assert json.loads(inside(*words).stdout)["scores"] == found["scores"]
    assert_refused(inside("eval", model, "--embed", tmp_path), 2, "is a folder")


def test_the_report_of_quantize_travels_too(tiny_bf16: Path, tmp_path: Path) -> None:
    model, report = tmp_path / "m.gguf", tmp_path / "report.json"
    assert inside("quantize", tiny_bf16, "--type", "iq4_nl", "--no-bounds", "--report", report, "-o", model).returncode == 0
    words = ("eval", model, "--data", TEXT, "--chunks", 2, "--threads", 1, "--cache", tmp_path)
    assert_refused(inside(*words, "--report", report), 2, "--embed")
    assert_refused(inside(*words, "--report", tiny_bf16, "--embed", model), 3, "is not a report")
    assert_refused(inside("eval", tiny_bf16, *words[2:], "--report", report, "--embed", tmp_path / "y.gguf"), 3, "about another file")
    assert inside(*words, "--report", report, "--embed", model).returncode == 0
    row = next(row for row in json.loads(report.read_text())["roles"] if row["role"] == "expert_down")
    card = inside("inspect", model, "--card").stdout
    assert f"| expert_down | iq4_nl | {row['error']:.5f} |  |" in card
    assert "fast kernels, effort 2, no importance" in card
    assert inside(*words, "--embed", model).returncode == 0
    assert "fast kernels, effort 2" in inside("inspect", model, "--card").stdout  # it stays when only the evaluation is new
