"""Wrong input to calibrate, eval, quantize, toolbench and verify-prompt: one clear message, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.flows.card_report import report_metadata
from a3b_gguf.flows.evaluate import EvalOptions, load_params
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.metadata import string
from command import assert_refused
from inside import inside

TEXT = "The capital of Chile is Santiago. " * 400


@pytest.mark.parametrize("command", ["calibrate", "eval", "quantize"])
@pytest.mark.parametrize("threads", [513, 1 << 31, 10**20])  # of these llama.cpp ended the process, or took another number
def test_more_threads_than_llama_cpp_has(tiny_bf16: Path, tmp_path: Path, command: str, threads: int) -> None:
    words = ("--type", "q8_0") if command == "quantize" else ()
    assert_refused(inside(command, tiny_bf16, *words, "--threads", threads, cwd=tmp_path), 2, "it must be 1 to 512")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [99_999, 10**20])
def test_more_layers_in_ram_than_a_model_can_have_are_all_of_them(layers: int) -> None:
    assert len(load_params(EvalOptions(n_cpu_moe=layers, n_gpu_layers=layers)).cpu_expert_layers) == 512


@pytest.mark.parametrize("text", ["", "hi"])
def test_a_text_without_tokens_is_named_and_leaves_no_folder(tiny_bf16: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "few.txt").write_text(text)
    done = inside("calibrate", tiny_bf16, "--data", tmp_path / "few.txt", "-o", tmp_path / "out")
    assert_refused(done, 3, f"{tmp_path / 'few.txt'}: there are fewer than 16 tokens")
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_no_text_are_told_with_the_whole_path(tiny_bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    done = inside("calibrate", tiny_bf16, "--data", tmp_path / "latin.txt", "-o", tmp_path / "out")
    assert_refused(done, 3, f"{tmp_path / 'latin.txt'}: byte 3 is not UTF-8")


@pytest.mark.parametrize("name", ["imatrix.gguf", "histograms.npz", "clip_bounds.bin"])
def test_a_calibration_that_cannot_be_written_is_not_run(tiny_bf16: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert_refused(inside("calibrate", tiny_bf16, "--chunks", 1, "-o", tmp_path), 2, f"{name} is a folder, not a file")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_calibration_goes_into_a_folder_that_can_be_written(tiny_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(inside("calibrate", tiny_bf16, "-o", "-", cwd=tmp_path), 2, "- is a pipe, not a folder")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)  # who runs the tests may have every right
    assert_refused(inside("calibrate", tiny_bf16, "-o", tmp_path / "out"), 2, "no right to write there")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [("--winsorize",), ("--ctx", 64), ("--enough", 1), ("--threads", 2), ("--output-tensor",)])
def test_merging_takes_no_flag_of_a_run(tiny_bf16: Path, tmp_path: Path, more: tuple[object, ...]) -> None:
    assert_refused(inside("calibrate", tiny_bf16, "--merge", tmp_path, *more, "-o", tmp_path / "out"), 2, "--merge runs nothing")


def test_merging_a_folder_with_itself(tiny_bf16: Path, tmp_path: Path) -> None:
    same = tmp_path / "x" / ".."
    (tmp_path / "x").mkdir()
    assert_refused(inside("calibrate", tiny_bf16, "--merge", tmp_path, "--merge", same, "-o", tmp_path / "out"), 2, "is named twice")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": string("clip")}, "'mmproj', expected a model"),
        ({"general.architecture": string("qwen35moe"), "general.type": string("adapter")}, "'adapter', expected a model"),
        ({"general.architecture": string("qwen35moe")}, "holds no tensors"),
    ],
)
def test_what_is_no_model_is_not_quantized_but_copied(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    write_gguf(tmp_path / "x.gguf", metadata, [])
    words = ("quantize", tmp_path / "x.gguf", "--no-bounds", "-o", tmp_path / "y.gguf")
    assert_refused(inside(*words, "--type", "q8_0"), 3, said)
    assert_refused(inside(*words, "--target-bpw", 5), 3, said)
    assert not (tmp_path / "y.gguf").exists()
    assert inside(*words, "--type", "copy").returncode == 0


def test_a_target_is_checked_before_kernels_are_compiled(tiny_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a3b_gguf.flows.quantize_target.make_ready", lambda *given: pytest.fail("compiles"))
    for more, said in ((("--target-size", 0), "0 bytes"), (("--target-bpw", 0), "cannot be"), (("--target-bpw", 5, "--effort", 9), "no 9")):
        assert_refused(inside("quantize", tiny_bf16, *more), 2, said)


def test_an_empty_argument_is_no_default_and_no_folder(tiny_bf16: Path, tmp_path: Path) -> None:
    ok = tmp_path / "ok.json"
    ok.write_text('[{"role": "user", "content": "hi"}]')
    for words, said in (
        (("quantize", tiny_bf16, "--type", "q8_0", "--kernel", ""), "--kernel: its value is empty"),
        (("verify-prompt", ok, "--profile", ""), "--profile: its value is empty"),
        (("calibrate", tiny_bf16, "--output", ""), "--output: its value is empty"),
        (("inspect", ""), "an argument is empty"),
        (("quantize", "", "--type", "q8_0"), "an argument is empty"),
    ):
        assert_refused(inside(*words, cwd=tmp_path), 2, said)
    assert list(tmp_path.iterdir()) == [ok]


def test_the_policy_beside_the_output_has_a_place(tiny_bf16: Path, tmp_path: Path) -> None:
    words = ("quantize", tiny_bf16, "--target-bpw", 5, "--sensitivity", "table", "-o", tmp_path / "x.gguf")
    assert_refused(inside(*words, "--report", tmp_path / "x.policy.toml"), 2, "where the policy beside the output is written")
    (tmp_path / "x.policy.toml").mkdir()
    done = inside(*words)
    assert_refused(done, 2, "x.policy.toml is a folder, not a file")
    assert "weigh types" not in done.stderr


def test_no_right_to_write_is_said_before_the_work(tiny_bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    monkeypatch.setattr("a3b_gguf.flows.quantize.write_files", lambda *given: pytest.fail("writes"))
    quantize = ("quantize", tiny_bf16, "--no-bounds", "-o", tmp_path / "x.gguf")
    assert_refused(inside(*quantize, "--type", "q8_0", "--report", tmp_path / "r.json"), 2, "no right to write into")
    assert_refused(inside(*quantize, "--target-bpw", 5), 2, "no right to write into")
    assert_refused(inside("eval", tiny_bf16, "--embed", tmp_path / "x.gguf"), 2, "no right to write into")
    assert inside(*quantize, "--type", "q8_0", "--dry-run").returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_is_a_folder_is_called_one(tiny_bf16: Path, tmp_path: Path) -> None:
    assert_refused(inside("quantize", tiny_bf16, "--policy", tmp_path), 2, f"{tmp_path} is not a file but a folder")


def test_a_source_in_a_place_that_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(inside("quantize", tmp_path / "file" / "x.gguf", "--type", "q8_0", cwd=tmp_path), 3, "x.gguf: Not a directory")


@pytest.mark.parametrize(
    "change",
    [{"kernel": 5}, {"effort": -1}, {"effort": 1e20}, {"error": float("nan")}, {"error": 1e300}, {"imatrix": 7}, {"tensors": []}]
    + [{"roles": [{"role": role, "type": "q8_0", "group_size": 32, "error": 0, "weighted_error": None}]} for role in (1, "a b", "")],
)
def test_a_report_whose_values_cannot_be_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    tensors = [{"name": "a", "type": "q8_0", "nbytes": 34}]
    good = {"kernel": "fast", "effort": 2, "imatrix": None, "error": 0.1, "roles": [], "tensors": tensors}
    (tmp_path / "r.json").write_text(json.dumps(good | change))
    with pytest.raises(BadInput, match="is not a report"):
        report_metadata(tmp_path / "r.json", tmp_path / "never-read.gguf")


@pytest.mark.parametrize("words", [("--timeout", "inf"), ("--timeout", 10**20), ("--trials", 10**20), ("--max-tokens", 10**20)])
def test_numbers_that_no_endpoint_can_take(words: tuple[object, ...]) -> None:
    assert_refused(inside("toolbench", "http://127.0.0.1:9/v1", *words), 2, "less than or equal to")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_measuring_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The child waits at a pipe that nobody writes; the end of its own pipe shows that it is gone."""
    os.mkfifo(tmp_path / "never")
    wait = f"print('up', flush=True); open({str(tmp_path / 'never')!r})"
    child = f"from a3b_quantize import measure; measure._end_with_parent(); {wait}"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"up\n"
        started.send_signal(signal.SIGTERM)
        assert started.stdout.read() == b""
