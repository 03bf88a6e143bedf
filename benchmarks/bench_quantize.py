"""Whole quantizations, files included, against llama_model_quantize at the same threads; thread scaling; the cold first run; memory.

Speed: one bf16 tensor of 192 experts of 512 x 2,048 (201 million weights) is read and a GGUF is written. Ours and theirs take turns in one
process, so that other work on the machine meets both. Limits, at effort 1 and at the default: IQ4_NL 8 times as fast, IQ4_XS 6, Q4_K, Q5_K
and Q6_K 2, Q8_0 1.2; 2 threads 1.8 times as fast as 1. Q4_0, MXFP4 and Q3_K have no limit: ggml hardly searches there, we do.
Memory: a 3.2 GB file with a 248,320 x 2,048 embedding and tensors of 256 experts; limit 1 GB of anonymous memory, kernels included.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import llama_cpp.llama_cpp as C
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from bench_convert import run as measured_run  # noqa: E402

from a3b_gguf.flows.quantize import Options, quantize_file  # noqa: E402
from a3b_gguf.gguf_write import write_gguf  # noqa: E402
from a3b_gguf.llama.log import LlamaLog  # noqa: E402
from a3b_gguf.tensors import TYPES, TensorJob  # noqa: E402
from a3b_quantize.encode import usable_cores  # noqa: E402
from a3b_quantize.kernels import DEFAULT_EFFORT, KERNELS  # noqa: E402
from a3b_quantize.policy import find_policy  # noqa: E402
from small_gguf import llama_metadata  # noqa: E402

SHAPE = (192, 512, 2048)
LEAST_RATIO = {"iq4_nl": 8.0, "iq4_xs": 6.0, "q4_k": 2.0, "q5_k": 2.0, "q6_k": 2.0, "q8_0": 1.2}
SEARCH = "arithmetic of the search"
WHAT_LIMITS = {
    **dict.fromkeys(KERNELS, SEARCH),
    "q8_0": "reading, bf16 to float32, writing",
    "q4_0": "arithmetic of the search; at effort 1 reading, bf16 to float32, writing",
    "mxfp4": "reading and trying three powers of two",
}
LEAST_SCALING = 1.8
MOST_MB = 1000
SECTIONS = ("speed", "scaling", "cold", "memory")


def experts(path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Path:
    """A bf16 GGUF of true widths: 16 million different weights, again and again."""
    values = (np.random.default_rng(0).standard_t(5, 1 << 24) * 0.02).astype(np.float32)
    stored = memoryview((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())

    def chunks(n_bytes: int) -> Iterator[memoryview]:
        for start in range(0, n_bytes, len(stored)):
            yield stored[: n_bytes - start]

    kind = TYPES["bf16"]
    jobs = [TensorJob(name, shape, kind, partial(chunks, kind.nbytes(shape))) for name, shape in shapes]
    write_gguf(path, llama_metadata(), jobs)
    return path


def ours(source: Path, output: Path, name: str, effort: int, threads: int) -> float:
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    quantize_file(source, output, Options(name, pure=True, kernel="fast", effort=effort, threads=threads, bounds=False))
    return time.perf_counter() - start


def theirs(source: Path, output: Path, name: str, threads: int) -> float:
    params, file_type = C.llama_model_quantize_default_params(), find_policy(name, pure=True).file_type
    assert file_type is not None
    params.ftype, params.pure, params.nthread = file_type, True, threads
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    with LlamaLog() as log:
        status = C.llama_model_quantize(str(source).encode(), str(output).encode(), ctypes.byref(params))
    if status:
        raise SystemExit("\n".join(line.text for line in log.lines()))
    return time.perf_counter() - start


def speed(folder: Path, names: Sequence[str]) -> bool:
    """Prints the table of whole runs; whether one misses its limit."""
    source, cores = experts(folder / "slice.gguf", [("blk.0.ffn_up_exps.weight", SHAPE)]), usable_cores()
    weights, missed, levels = float(np.prod(SHAPE)), False, sorted({1, DEFAULT_EFFORT})
    print(f"{weights / 1e6:.0f} M weights of bf16, {cores} threads, files included; M weights/s, times as fast; default {DEFAULT_EFFORT}")
    print(f"{'type':8}{'llama_model_quantize':>21}" + "".join(f"{f'effort {level}':>20}" for level in levels) + "   limit   what limits us")
    for name in names:
        times: dict[int, list[float]] = {level: [] for level in (0, *levels)}
        for turn in range(3):
            for level in levels:
                times[level].append(ours(source, folder / "ours.gguf", name, level, cores))
            if turn == 0 or sum(times[0]) < 12:
                times[0].append(theirs(source, folder / "theirs.gguf", name, cores))
        best, limit = {level: min(each) for level, each in times.items()}, LEAST_RATIO.get(name)
        ratios = {level: best[0] / best[level] for level in levels}
        missed |= limit is not None and min(ratios.values()) < limit
        line = f"{name:8}{weights / best[0] / 1e6:21.1f}"
        line += "".join(f"{weights / best[level] / 1e6:11.1f}{ratios[level]:8.2f}x" for level in levels)
        print(f"{line}   {limit or '-':>5}   {WHAT_LIMITS[name]}", flush=True)
    return missed


def scaling(folder: Path, _: Sequence[str]) -> bool:
    """Prints how much faster two threads are than one; whether that is too little."""
    source = experts(folder / "slice.gguf", [("blk.0.ffn_up_exps.weight", SHAPE)])
    if usable_cores() < 2:
        print("scaling: this machine has one core")
        return False
    times = {1: [0.0], 2: [0.0]}
    for threads in (1, 2, 2, 1, 1, 2):
        times[threads].append(ours(source, folder / "ours.gguf", "iq4_nl", DEFAULT_EFFORT, threads))
    ratio = min(times[1][1:]) / min(times[2][1:])
    print(f"\niq4_nl, 2 threads against 1: {ratio:.2f} times as fast, limit {LEAST_SCALING}")
    return ratio < LEAST_SCALING


def cold(folder: Path, _: Sequence[str]) -> bool:
    """Prints how long a first run compiles, and how long a later one loads."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}

    def start(names: Sequence[str]) -> float:
        code = f"from a3b_quantize.kernels import make_ready; make_ready({list(names)}, lambda text: None)"
        begun = time.perf_counter()
        subprocess.run((sys.executable, "-c", code), env=environment, check=True)
        return time.perf_counter() - begun

    one, most, later = start(["iq4_nl"]), start(list(KERNELS)), start(list(KERNELS))
    print(f"\ncold: iq4_nl compiled in {one:.1f} s, the other {len(KERNELS) - 1} in {most:.1f} s, all loaded from disk in {later:.1f} s")
    return False


def memory(folder: Path, _: Sequence[str]) -> bool:
    """Prints the peak of anonymous memory of `a3b quantize` on a large file; whether it is too much."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (248320, 2048))]
    shapes += [(f"blk.0.ffn_{part}_exps.weight", (256, *shape)) for part, shape in (("gate", (512, 2048)), ("up", (512, 2048)))]
    shapes += [(f"blk.{i}.ffn_down_exps.weight", (256, 2048, 512)) for i in range(2)]
    source = experts(folder / "large.gguf", shapes)
    a3b = Path(sys.executable).parent / "a3b"
    done = measured_run(a3b, "quantize", source, "--type", "iq4_nl", "--no-bounds", "-o", folder / "out.gguf")
    size = source.stat().st_size / 1e9
    source.unlink()
    print(f"\na3b quantize --type iq4_nl, {size:.1f} GB: {done.seconds:.1f} s, anonymous memory {done.peak_mb:.0f} MB, limit {MOST_MB} MB")
    return done.peak_mb > MOST_MB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS)
    parser.add_argument("--types", choices=tuple(KERNELS), nargs="+", default=tuple(KERNELS))
    wanted = parser.parse_args()
    checks: dict[str, Callable[[Path, Sequence[str]], bool]] = {"speed": speed, "scaling": scaling, "cold": cold, "memory": memory}
    print(f"load {os.getloadavg()[0]:.1f} on {usable_cores()} cores before the first run; beside other work do not trust the ratios")
    with tempfile.TemporaryDirectory() as name:
        failed = [section for section in wanted.only if checks[section](Path(name), wanted.types)]
    print(f"\nbeyond their limits: {', '.join(failed)}" if failed else "\nall within their limits")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
