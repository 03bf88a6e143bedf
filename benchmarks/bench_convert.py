"""Convert and one-pass quantize at the 35B's widths: time beside `cp` + `sync` of the same file, and peak anonymous memory.

    python benchmarks/bench_convert.py [--no-quantize] [--torch-python PYTHON --sdist FOLDER]

The input is 5.3 GB of bf16 safetensors with random bits, made once in build/bench: one DeltaNet layer and the MTP block (an attention
layer), each with 256 experts, and embeddings and output of 248,320 x 2,048. It is read once before, so every run finds it in the page
cache; each run ends when its output is on disk; runs take turns and the best of three counts.
Limits: convert at most 1.5x cp + sync and 512 MB; IQ4_NL (without the MTP block, to save time) 1 GB; with an interpreter that has torch
and the unpacked source of llama-cpp-python, convert at least 3x faster than llama.cpp's own converter.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tiny import TEMPLATE, Form, Sizes, all_shapes, config_json, tokenizer_json  # noqa: E402

FOLDER = ROOT / "build" / "bench"
WIDTHS = Sizes(
    hidden=2048, n_head=16, n_kv=2, head=256, k_heads=16, v_heads=32, linear_head=128, n_layer=1, n_expert=256, n_used=8, ff=512,
    shared_ff=512, vocab=248320,
)  # fmt: skip
RUNS = 3
COPY_LIMIT, PEER_LIMIT, CONVERT_MB, QUANTIZE_MB = 1.5, 3.0, 512, 1000
# Runs the vendored converter; it refuses tokenizers whose hash it has not seen, so that check is answered beforehand.
PEER = """
import sys
sdist, source, output = sys.argv[1:]
sys.path[:0] = [sdist + "/vendor/llama.cpp", sdist + "/vendor/llama.cpp/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
import convert_hf_to_gguf
sys.argv = ["convert", source, "--outfile", output, "--outtype", "bf16"]
convert_hf_to_gguf.main()
"""


@dataclass(frozen=True)
class Run:
    """seconds: wall time; peak_mb: the most anonymous memory that was seen, in 10^6 bytes."""

    seconds: float
    peak_mb: float


def checkpoint(folder: Path) -> Path:
    """The slice, made when it is not there yet."""
    done = folder / "chat_template.jinja"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shapes = all_shapes(WIDTHS)
    (folder / "config.json").write_text(json.dumps(config_json(WIDTHS, Form())))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(WIDTHS.vocab)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}))
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at := at + 2 * prod(shape)]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    block = (rng.standard_normal(1 << 24, np.float32) / 45).view(np.uint32) >> 16
    bits = np.tile(block.astype(np.uint16), 2)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            left = prod(shape)
            while left:
                n = min(left, 1 << 24)
                start = int(rng.integers(1 << 24))
                out.write(bits[start : start + n].data)
                left -= n
    done.write_text(TEMPLATE)
    return folder


def run(*command: object) -> Run:
    """One process, its memory sampled while it works."""
    start = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(process.communicate()[1])
    return Run(seconds, peak / 1e6)


def anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)


def copy(source: Path, output: Path) -> Run:
    start = time.perf_counter()
    subprocess.run(("cp", source, output), check=True)
    subprocess.run(("sync", output), check=True)
    return Run(time.perf_counter() - start, 0)


def clear(output: Path) -> None:
    """No run pays for what an earlier one left to be written."""
    output.unlink(missing_ok=True)
    os.sync()


def best(runs: Sequence[Run]) -> Run:
    """The fastest of the runs, with the largest peak of any."""
    return Run(min(each.seconds for each in runs), max(each.peak_mb for each in runs))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-quantize", action="store_true")
    parser.add_argument("--torch-python", type=Path)
    parser.add_argument("--sdist", type=Path)
    wanted = parser.parse_args()
    a3b = Path(sys.executable).parent / "a3b"
    source, output = checkpoint(FOLDER / "slice"), FOLDER / "out.gguf"
    weights = source / "model.safetensors"
    with weights.open("rb") as data:  # warm
        while data.read(1 << 24):
            pass
    copies: list[Run] = []
    converted: list[Run] = []
    for _ in range(RUNS):
        clear(output)
        copies.append(copy(weights, output))
        clear(output)
        converted.append(run(a3b, "convert", source, "-o", output))
    cp, ours = best(copies), best(converted)
    n_bytes = weights.stat().st_size
    print(f"{n_bytes / 1e9:.2f} GB of bf16 safetensors, warm; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"cp + sync          {cp.seconds:7.1f} s   {n_bytes / cp.seconds / 1e6:6.0f} MB/s   all runs {all_seconds(copies)}")
    print(f"a3b convert        {ours.seconds:7.1f} s   {n_bytes / ours.seconds / 1e6:6.0f} MB/s   all runs {all_seconds(converted)}")
    ratio = ours.seconds / cp.seconds
    print(f"  of cp + sync     {ratio:7.2f} x   limit {COPY_LIMIT} x")
    print(f"  peak anonymous   {ours.peak_mb:7.0f} MB  limit {CONVERT_MB} MB")
    failed = ratio > COPY_LIMIT or ours.peak_mb > CONVERT_MB
    if wanted.torch_python and wanted.sdist:
        output.unlink()
        peer = run(wanted.torch_python, "-c", PEER, wanted.sdist, source, output)
        subprocess.run(("sync", output), check=True)
        print(f"llama.cpp's        {peer.seconds:7.1f} s   {peer.peak_mb:7.0f} MB, one run")
        print(f"  of a3b convert   {peer.seconds / ours.seconds:7.2f} x   limit {PEER_LIMIT} x")
        failed |= peer.seconds / ours.seconds < PEER_LIMIT
    output.unlink()
    if not wanted.no_quantize:
        done = run(a3b, "quantize", source, "--type", "iq4_nl", "--no-bounds", "--no-mtp", "-o", output)
        output.unlink()
        print(f"a3b quantize       {done.seconds:7.1f} s   IQ4_NL, without the MTP block")
        print(f"  peak anonymous   {done.peak_mb:7.0f} MB  limit {QUANTIZE_MB} MB")
        failed |= done.peak_mb > QUANTIZE_MB
    return int(failed)


def all_seconds(runs: Sequence[Run]) -> str:
    return ", ".join(f"{each.seconds:.1f}" for each in runs)


if __name__ == "__main__":
    sys.exit(main())
