"""Our quantization kernels against ggml's: error by type and input, then whole runs against llama_model_quantize at the same threads.

The runs read and write: one bf16 tensor of 192 experts of 512 x 2,048 (201 million weights). Ours and theirs take turns in one process, so
that other work on the machine meets both. Limits: the error at most ggml's; IQ4_NL 8 times as fast, IQ4_XS 6, Q4_K, Q5_K and Q6_K 2,
Q8_0 1.2; 2 threads 1.8 times as fast as 1. Q4_0 and MXFP4 have no limit: ggml does not search for them, we do.

What limits each: IQ4_NL and IQ4_XS, Q4_K, Q5_K, Q6_K and Q4_0: arithmetic of the search (16, 21, 16 or 19 scales a block); Q8_0 and MXFP4:
reading bf16, turning it into float32 and writing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from a3b_gguf.flows.quantize import Options, quantize_file  # noqa: E402
from a3b_gguf.gguf_write import write_gguf  # noqa: E402
from a3b_gguf.llama.ggml import quantize_chunk  # noqa: E402
from a3b_gguf.tensors import TYPES, TensorJob  # noqa: E402
from a3b_quantize.encode import usable_cores  # noqa: E402
from a3b_quantize.kernels import KERNELS  # noqa: E402
from a3b_quantize.policy import find_policy  # noqa: E402
from kernel_errors import distributions, importance_of, relative_error  # noqa: E402
from llama_quantize import llama_quantize  # noqa: E402
from small_gguf import llama_metadata  # noqa: E402

SHAPE = (192, 512, 2048)
LEAST_RATIO = {"iq4_nl": 8.0, "iq4_xs": 6.0, "q4_k": 2.0, "q5_k": 2.0, "q6_k": 2.0, "q8_0": 1.2}
LEAST_SCALING = 1.8
RUNS = 3


def errors() -> bool:
    """Prints the table of errors; whether one of ours is larger than ggml's."""
    print(f"{'type':8}{'input':14}{'importance':>11}{'ours':>12}{'ggml':>12}{'ratio':>9}{'ratio of plain errors':>24}")
    worse = False
    for name, kernel in KERNELS.items():
        for title, rows in distributions(64, 2048).items():
            for importance in (None, importance_of(rows.shape[1])):
                blocks = kernel(rows, importance), quantize_chunk(TYPES[name], rows, importance)
                ours, theirs = (relative_error(name, data, rows, importance) for data in blocks)
                plain = [relative_error(name, data, rows, importance, plain=True) for data in blocks]
                worse |= ours > theirs * (1 + 1e-6)
                given = "no" if importance is None else "yes"
                print(f"{name:8}{title:14}{given:>11}{ours:12.4g}{theirs:12.4g}{ours / theirs:9.4f}{plain[0] / plain[1]:24.4f}")
    return worse


def slice_of_experts(path: Path) -> Path:
    """A bf16 GGUF of one tensor of true width, 201 million weights: 16 million different ones, again and again."""
    values = (np.random.default_rng(0).standard_t(5, 1 << 24) * 0.02).astype(np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def chunks() -> Iterator[bytes]:
        for _ in range(int(np.prod(SHAPE)) // values.size):
            yield stored

    write_gguf(path, llama_metadata(), [TensorJob("blk.0.ffn_up_exps.weight", SHAPE, TYPES["bf16"], chunks)])
    return path


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speeds(folder: Path) -> bool:
    """Prints the table of whole runs; whether one misses its limit."""
    source, cores = slice_of_experts(folder / "slice-bf16.gguf"), usable_cores()
    weights, missed = float(np.prod(SHAPE)), False
    print(f"\n{'type':8}{'threads':>8}{'ours, M weights/s':>19}{'llama_model_quantize':>22}{'ratio':>8}   limit")
    for name in KERNELS:
        file_type = find_policy(name).file_type
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(RUNS):
            ours.append(seconds(lambda name=name: run(source, folder, name, cores)))  # type: ignore[misc]
            if sum(theirs) < 30:
                theirs.append(seconds(lambda kind=file_type: llama_quantize(source, folder / "theirs.gguf", kind, True, cores)))  # type: ignore[misc]
        ratio, limit = min(theirs) / min(ours), LEAST_RATIO.get(name)
        missed |= limit is not None and ratio < limit
        rates = f"{weights / min(ours) / 1e6:19.0f}{weights / min(theirs) / 1e6:22.1f}"
        print(f"{name:8}{cores:8}{rates}{ratio:8.1f}   {f'at least {limit}' if limit else 'none'}")
    times = {1: [0.0], 2: [0.0]}
    for threads in (1, 2) * RUNS:
        times[threads].append(seconds(lambda threads=threads: run(source, folder, "iq4_nl", threads)))  # type: ignore[misc]
    scaling = min(times[1][1:]) / min(times[2][1:])
    print(f"iq4_nl, 2 threads against 1: {scaling:.2f} times as fast   at least {LEAST_SCALING}")
    return missed or scaling < LEAST_SCALING


def run(source: Path, folder: Path, name: str, threads: int) -> None:
    quantize_file(source, folder / "ours.gguf", Options(name, kernel="fast", threads=threads, bounds=False))


def cold(folder: Path) -> None:
    """Prints how long a first run compiles, and how long a later one loads."""
    code = f"from a3b_quantize.kernels import make_ready; make_ready({list(KERNELS)}, lambda text: None)"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    first, later = (seconds(lambda: subprocess.run((sys.executable, "-c", code), env=environment, check=True)) for _ in range(2))
    print(f"all {len(KERNELS)} kernels: compiled {first:.1f} s, loaded from disk {later:.1f} s, process and imports included")


def main() -> int:
    worse = errors()
    with tempfile.TemporaryDirectory() as name:
        missed = speeds(Path(name))
        cold(Path(name))
    return int(worse or missed)


if __name__ == "__main__":
    sys.exit(main())
