"""`a3b calibrate`: the numbers of an importance matrix, against llama.cpp's own tool and arithmetic by hand; resume, merge."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import read_bounds
from a3b_gguf.errors import BadInput, Interrupted, MachineLacks, UsageError
from a3b_gguf.flows.calibrate import Calibrated, Options, calibrate_file, has_mtp
from a3b_gguf.flows.calibration_merge import merge_folders
from a3b_gguf.flows.quantize import Options as QuantizeOptions
from a3b_gguf.flows.quantize import quantize_file
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_quantize.bounds import check_model
from a3b_quantize.file_types import file_type
from a3b_quantize.imatrix import read_imatrix
from a3b_quantize.importance import plain_importance
from command import a3b, assert_refused
from golden_files import read_golden
from inside import inside
from llama_quantize import llama_quantize
from small_gguf import write_arrays
from test_measure import random_llama

SAMPLE = Path(__file__).parent.parent / "quantize" / "a3b_quantize" / "sample.txt"
FILES = ("clip_bounds.bin", "histograms.npz", "imatrix.gguf")
SHORT = Options((str(SAMPLE),), n_ctx=128, most_chunks=4, enough=0)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Calibrated:
    return calibrate_file(tiny_bf16, tmp_path_factory.mktemp("calibrated") / "out", replace(SHORT, winsorize=True))


def test_entries_are_those_of_llama_imatrix(done: Calibrated, tiny_checkpoint: Path) -> None:
    """Counts equal; sums within what adding in float32 instead of float64 makes."""
    golden = read_golden("imatrix_tiny_a3b.npz", "imatrix_llama.py", tiny_checkpoint)
    assert str(golden.pop("text_sha256")) == hashlib.sha256(SAMPLE.read_bytes()).hexdigest()
    golden.pop("safetensors_sha256")
    found = read_imatrix(done.imatrix)
    trunk = {name: entry for name, entry in found.entries.items() if not name.startswith("blk.4.")}
    assert {name.rpartition(".")[0] for name in golden} == set(trunk)
    for name, entry in trunk.items():
        assert entry.counts.tolist() == golden[f"{name}.counts"].tolist(), name
        np.testing.assert_allclose(entry.sums.reshape(-1)[::16], golden[f"{name}.in_sum2"], rtol=1e-4, atol=1e-6, err_msg=name)
    assert (found.chunk_size, found.chunk_count, found.datasets) == (128, 4, ("sample.txt",))


def rms_norm(rows: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    return scaled


def test_the_mtp_block_sees_each_token_beside_the_row_before_it(done: Calibrated, tiny_bf16: Path) -> None:
    """The token's half of eh_proj's input by hand; the other half is the trunk's last norm, so its sums lack each chunk's last token."""
    tensors = {tensor.name: tensor for tensor in open_gguf_model(tiny_bf16).tensors}
    with load_model(tiny_bf16, LoadParams(n_ctx=256)) as model:
        tokens = Vocab(model).tokenize(SAMPLE.read_text(encoding="utf-8"), parse_special=True)[:512]
    embedded = np.concatenate([tensors["token_embd.weight"].rows(token, token + 1) for token in tokens])
    expected = (rms_norm(embedded, tensors["blk.4.nextn.enorm.weight"].rows(0, 1)[0]) ** 2).sum(axis=0)
    entries = read_imatrix(done.imatrix).entries
    both = entries["blk.4.nextn.eh_proj.weight"]
    assert both.counts.tolist() == [512]
    np.testing.assert_allclose(both.sums[0, :256], expected, rtol=2e-3)
    assert entries["blk.4.ffn_down_exps.weight"].counts.sum() == 2 * 512
    assert both.sums[0, 256:].min() > 0


def test_query_key_and_value_share_their_sums(done: Calibrated) -> None:
    entries = read_imatrix(done.imatrix).entries
    for part in ("k", "v"):
        assert np.array_equal(entries["blk.3.attn_q.weight"].sums, entries[f"blk.3.attn_{part}.weight"].sums)
    assert not np.array_equal(entries["blk.3.attn_q.weight"].sums, entries["blk.3.attn_output.weight"].sums)


def test_winsorized_sums_are_smaller_where_values_are_large(done: Calibrated) -> None:
    assert done.winsorized is not None
    plain, capped = read_imatrix(done.imatrix).entries, read_imatrix(done.winsorized).entries
    assert set(plain) == set(capped)
    changed = 0
    for name, entry in plain.items():
        assert np.array_equal(entry.counts, capped[name].counts)
        assert (capped[name].sums <= entry.sums).all()
        changed += bool((capped[name].sums < entry.sums).any())
    assert changed > 40
    bound = read_bounds(done.bounds).of("ssm_out_in")[2].p99_9  # the cap was learned from the same four chunks
    entry = capped["blk.2.ssm_out.weight"]
    assert entry.sums.max() <= entry.counts[0] * (bound * 1.0001) ** 2
    assert entry.sums.sum() < 0.95 * plain["blk.2.ssm_out.weight"].sums.sum()


def test_ranges_and_histograms_are_written_too(done: Calibrated, tiny_bf16: Path) -> None:
    bounds = read_bounds(done.bounds)
    assert check_model(bounds, read_gguf(tiny_bf16), done.bounds) == ""
    assert bounds.header.tokens == done.tokens == 512
    assert {each.site for each in bounds.records} == {
        "attn_in", "k_cache", "v_cache", "attn_out_in", "ssm_in", "ssm_out_in", "ffn_in", "down_in", "down_out", "residual"
    }  # fmt: skip


def test_output_matrix_on_request(tiny_bf16: Path, tmp_path: Path) -> None:
    with_output = replace(SHORT, most_chunks=1, output_tensor=True)
    for options, counts in ((with_output, [128]), (replace(with_output, output_tensor=False), None)):
        entry = read_imatrix(calibrate_file(tiny_bf16, tmp_path / "out", options).imatrix).entries.get("output.weight")
        assert (entry.counts.tolist() if entry else None) == counts


def test_a_dense_model(tiny_bf16: Path, tmp_path: Path) -> None:
    done = calibrate_file(random_llama(tmp_path / "dense.gguf", tiny_bf16, 0), tmp_path / "out", replace(SHORT, most_chunks=1))
    names = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    assert set(read_imatrix(done.imatrix).entries) == {f"blk.0.{name}.weight" for name in names}
    assert done.covered == ()


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on_with_the_same_result(tiny_bf16: Path, tmp_path: Path) -> None:
    options = replace(SHORT, winsorize=True, save_seconds=0)

    def stop(done: int, total: int, text: str) -> None:
        if text.startswith("chunk 3"):
            raise Killed

    with pytest.raises(Killed):
        calibrate_file(tiny_bf16, tmp_path / "out", options, stop)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["calibration.state"]
    other = calibrate_file(tiny_bf16, tmp_path / "other", options)
    resumed = calibrate_file(tiny_bf16, tmp_path / "out", options)
    assert (resumed.resumed, other.resumed) == (3, 0)
    for name in (*FILES, "imatrix-winsorized.gguf"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    assert not (tmp_path / "out" / "calibration.state").exists()


def test_a_state_of_something_else_is_not_continued(tiny_bf16: Path, tmp_path: Path) -> None:
    state = tmp_path / "out" / "calibration.state"

    def stop(done: int, total: int, text: str) -> None:
        if text.startswith("chunk 2"):
            raise Killed

    with pytest.raises(Killed):
        calibrate_file(tiny_bf16, tmp_path / "out", replace(SHORT, save_seconds=0), stop)
    whole = state.read_bytes()
    assert calibrate_file(tiny_bf16, tmp_path / "out", replace(SHORT, n_ctx=64)).resumed == 0
    state.write_bytes(whole[: len(whole) // 2])
    assert calibrate_file(tiny_bf16, tmp_path / "out", SHORT).resumed == 0
    state.write_bytes(whole)
    assert calibrate_file(tiny_bf16, tmp_path / "out", SHORT).resumed == 2


@pytest.mark.prove
def test_killed_for_real(tiny_bf16: Path, tmp_path: Path) -> None:
    """kill -9 at ten moments of one run, then to the end: the same bytes as without."""
    code = (
        "import sys; from pathlib import Path; from a3b_gguf.flows.calibrate import Options, calibrate_file; "
        "calibrate_file(Path(sys.argv[1]), Path(sys.argv[2]), Options((sys.argv[3],), n_ctx=32, enough=0, save_seconds=0))"
    )
    command = [sys.executable, "-c", code, str(tiny_bf16)]
    subprocess.run([*command, str(tmp_path / "whole"), str(SAMPLE)], check=True)
    for number in range(10):
        run = subprocess.Popen([*command, str(tmp_path / "out"), str(SAMPLE)])
        time.sleep(0.5 + 0.06 * number)
        run.send_signal(signal.SIGKILL)
        run.wait()
    subprocess.run([*command, str(tmp_path / "out"), str(SAMPLE)], check=True)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_merging_is_one_run_over_both_texts(tiny_bf16: Path, tmp_path: Path) -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    (tmp_path / "a.txt").write_text(text[:900], encoding="utf-8")
    (tmp_path / "b.txt").write_text(text[1500:2400], encoding="utf-8")
    a, b = (str(tmp_path / name) for name in ("a.txt", "b.txt"))
    options = Options(n_ctx=64, enough=0)
    both = calibrate_file(tiny_bf16, tmp_path / "both", replace(options, data=(a, b)))
    for name in (a, b):
        calibrate_file(tiny_bf16, tmp_path / f"of-{Path(name).stem}", replace(options, data=(name,)))
    merged = merge_folders(tiny_bf16, [tmp_path / "of-a", tmp_path / "of-b"], tmp_path / "merged")
    assert (merged.tokens, merged.chunks, merged.covered) == (both.tokens, both.chunks, both.covered)
    assert read_bounds(merged.bounds).records == read_bounds(both.bounds).records
    one, other = read_imatrix(merged.imatrix), read_imatrix(both.imatrix)
    assert (one.chunk_count, one.datasets) == (other.chunk_count, ("a.txt", "b.txt"))
    for name, entry in other.entries.items():
        assert np.array_equal(entry.counts, one.entries[name].counts)
        np.testing.assert_allclose(one.entries[name].sums, entry.sums, rtol=1e-6)


def test_what_cannot_be_merged(tiny_bf16: Path, tmp_path: Path, done: Calibrated) -> None:
    calibrate_file(tiny_bf16, tmp_path / "other", replace(SHORT, n_ctx=64, most_chunks=1))
    with pytest.raises(UsageError, match="chunks of 64 and 128 tokens"):
        merge_folders(tiny_bf16, [done.folder, tmp_path / "other"], tmp_path / "merged")
    dense = random_llama(tmp_path / "dense.gguf", tiny_bf16, 0)
    with pytest.raises(BadInput, match="was measured on another model: Tiny A3B"):
        merge_folders(dense, [done.folder], tmp_path / "merged")
    (tmp_path / "other" / "histograms.npz").write_bytes(b"PK\3\4 nonsense")
    with pytest.raises(BadInput, match="no histograms.npz, or a damaged one"):
        merge_folders(tiny_bf16, [tmp_path / "other"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_it_stops_when_every_expert_has_seen_enough(tiny_bf16: Path, tmp_path: Path) -> None:
    done = a3b("calibrate", tiny_bf16, "-o", tmp_path / "out", "--ctx", 128, "--enough", 20, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stopped_early"]
    assert found["chunks"] == 32 < found["chunks_given"]
    assert min(layer["fewest"] for layer in found["covered"]) >= 20
    assert [layer["layer"] for layer in found["covered"]] == [0, 1, 2, 3, 4]


def test_the_table_says_who_saw_little(tiny_bf16: Path, tmp_path: Path) -> None:
    done = a3b("calibrate", tiny_bf16, "--data", SAMPLE, "--ctx", 64, "--chunks", 1, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "below 64" in done.stdout
    assert "read 64 tokens of sample.txt in 1 of 1 chunks" in done.stdout
    assert "experts in 5 layers saw fewer than 64 tokens" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)


def test_stopped_by_hand(tiny_bf16: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if text.startswith("chunk 2"):
            raise KeyboardInterrupt

    for seconds, said in ((60.0, "nothing was saved yet"), (0.0, "goes on from the last save")):
        with pytest.raises(Interrupted, match="was stopped") as caught:
            calibrate_file(tiny_bf16, tmp_path / "out", replace(SHORT, save_seconds=seconds), stop)
        assert said in caught.value.hint


def test_a_model_that_does_not_fit(tiny_bf16: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineLacks, match=r"calibration needs .* of memory, 512.00 MiB are free"):
        calibrate_file(tiny_bf16, tmp_path / "out", SHORT, free_bytes=lambda: 512 << 20)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_run_writes(tiny_bf16: Path, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(MachineLacks, match="is being written by another run"):
        calibrate_file(tiny_bf16, tmp_path, SHORT)
    os.close(descriptor)


def test_flags_that_make_no_sense(tiny_bf16: Path, tmp_path: Path) -> None:
    assert_refused(inside("calibrate", tiny_bf16, "--ctx", 8), 2, "--ctx: 8 tokens")
    assert_refused(inside("calibrate", tiny_bf16, "--chunks", 0), 2, "--chunks: 0 is too small")
    assert_refused(inside("calibrate", tiny_bf16, "--ctx", 1_000_000, cwd=tmp_path), 2, "1,000,000 tokens are more than the")
    assert_refused(inside("calibrate", tiny_bf16, "-o", tmp_path / "no" / "where"), 2, "the folder of the output must exist")
    assert_refused(inside("calibrate", tiny_bf16, "-o", tiny_bf16), 2, "is a file")
    assert_refused(inside("calibrate", tiny_bf16, "--merge", tmp_path, "--data", SAMPLE), 2, "--merge runs nothing")
    assert_refused(inside("calibrate", tiny_bf16, "--merge", tmp_path, "-o", tmp_path), 3, "histograms.npz")
    assert_refused(inside("calibrate", SAMPLE), 3, "sample.txt")


def test_a_model_whose_activations_are_not_finite(tiny_bf16: Path, tmp_path: Path) -> None:
    source = random_llama(tmp_path / "dense.gguf", tiny_bf16, 0)
    model = open_gguf_model(source)
    arrays = {tensor.name: tensor.rows(0, int(np.prod(tensor.shape[:-1]))).reshape(tensor.shape).copy() for tensor in model.tensors}
    arrays["blk.0.ffn_up.weight"][:] = 1e30
    broken = write_arrays(tmp_path / "broken.gguf", arrays, model.metadata)
    with pytest.raises(BadInput, match=r"what goes into blk.0.ffn_down.weight, channel \d+, is not finite or too large"):
        calibrate_file(broken, tmp_path / "out", replace(SHORT, most_chunks=1))


def test_mtp_is_told_from_the_tensors(tiny_bf16: Path) -> None:
    file = read_gguf(tiny_bf16)
    names = [info.name for info in file.tensors]
    assert has_mtp(file, names)
    assert not has_mtp(file, [name for name in names if not name.startswith("blk.4.")])


# ggml's IQ4_NL alone takes 5 seconds; test_stock_importance.py has it on a narrow model.
@pytest.mark.parametrize("type_name", ["q4_k_m", pytest.param("iq4_nl", marks=pytest.mark.prove)])
def test_llama_quantize_takes_the_matrix_and_gives_our_bytes(done: Calibrated, tiny_bf16: Path, tmp_path: Path, type_name: str) -> None:
    values = {name: plain_importance(entry).reshape(-1) for name, entry in read_imatrix(done.imatrix).entries.items()}
    theirs = llama_quantize(tiny_bf16, tmp_path / "theirs.gguf", file_type(type_name).number, importance=values)
    options = QuantizeOptions(type_name, stock=True, kernel="ggml", imatrix=done.imatrix, bounds=False)
    ours = quantize_file(tiny_bf16, tmp_path / "ours.gguf", options).path
    mine, other = ({tensor.name: tensor for tensor in open_gguf_model(path).tensors} for path in (ours, theirs))
    assert set(mine) == set(other)
    for name, tensor in mine.items():
        n_rows = int(np.prod(tensor.shape[:-1]))
        assert tensor.type == other[name].type, name
        assert bytes(tensor.raw(0, n_rows)) == bytes(other[name].raw(0, n_rows)), name
