"""Our quantization kernels against ggml's: the error by type and input, and what each effort costs and gives.

Limits: the weighted error (what ggml's own search minimises) at most ggml's everywhere, at every effort; more effort, less error. Errors
are relative to ggml's. Beside it stands the plain error, all weights alike: with importance it rises, since what hardly counts may err.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from a3b_gguf.llama.ggml import quantize_chunk  # noqa: E402
from a3b_gguf.tensors import TYPES  # noqa: E402
from a3b_quantize.kernels import DEFAULT_EFFORT, EFFORTS, KERNELS  # noqa: E402
from kernel_errors import distributions, importance_of, relative_error  # noqa: E402

Floats = NDArray[np.float32]
# Whose error does not depend on effort: rounding to nearest has one best answer, powers of two are tried throughout.
WITHOUT_EFFORT = ("q8_0", "mxfp4")
GROUP_LIMITS = {64: (1.15, 1.27), 128: (1.3, 1.45)}


def errors() -> bool:
    """Prints the table of errors at the default effort; whether one at any effort is larger than ggml's."""
    print(f"Errors over ggml's at effort {DEFAULT_EFFORT}: weighted as in ggml's search, and plain; ! where a weighted one is larger\n")
    print(f"{'type':8}{'input':14}{'importance':>11}{'ours':>12}{'ggml':>12}{'ratio':>9}{'plain':>9}   ratio at efforts {EFFORTS}")
    worse = False
    for name, kernel in KERNELS.items():
        for title, rows in distributions(64, 2048).items():
            for importance in (None, importance_of(rows.shape[1])):
                theirs = quantize_chunk(TYPES[name], rows, importance)
                least, plain = (relative_error(name, theirs, rows, importance, plain=each) for each in (False, True))
                blocks = {effort: kernel(rows, importance, effort=effort) for effort in EFFORTS}
                found = {effort: relative_error(name, data, rows, importance) for effort, data in blocks.items()}
                ours_plain = relative_error(name, blocks[DEFAULT_EFFORT], rows, importance, plain=True)
                bad = any(error > least * (1 + 1e-6) for error in found.values())
                worse |= bad
                given = "no" if importance is None else "yes"
                print(
                    f"{name:8}{title:14}{given:>11}{found[DEFAULT_EFFORT]:12.4g}{least:12.4g}{ratio(found[DEFAULT_EFFORT], least):>9}"
                    f"{ratio(ours_plain, plain):>9}   {'  '.join(ratio(error, least) for error in found.values())}{' !' if bad else ''}"
                )
    return worse


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.4f}" if theirs else "-"


def efforts() -> bool:
    """Prints what effort costs and gives on one core; whether more of it ever gives more error."""
    rows = (np.random.default_rng(0).standard_t(5, (512, 2048)) * 0.02).astype(np.float32)
    print("\nEffort, Student-t (5) weights, one core: M weights/s, how many times as fast as ggml's kernel, weighted error over ggml's\n")
    print(f"{'type':8}{'importance':>11}{'ggml, M/s':>11}" + "".join(f"{f'effort {effort}':>26}" for effort in EFFORTS))
    worse = False
    for name, kernel in KERNELS.items():
        for importance in (None, importance_of(rows.shape[1])):
            ggml = seconds(lambda kind=TYPES[name], weights=importance: quantize_chunk(kind, rows, weights))  # type: ignore[misc]
            theirs = relative_error(name, quantize_chunk(TYPES[name], rows, importance), rows, importance)
            line, last = f"{name:8}{'no' if importance is None else 'yes':>11}{rows.size / ggml / 1e6:11.1f}", np.inf
            for effort in EFFORTS:
                ours = seconds(lambda run=kernel, weights=importance, effort=effort: run(rows, weights, effort=effort))  # type: ignore[misc]
                error = relative_error(name, kernel(rows, importance, effort=effort), rows, importance)
                worse |= error > last or (error == last and name not in WITHOUT_EFFORT)
                last = error
                line += f"{rows.size / ours / 1e6:10.1f}{ggml / ours:8.2f}x{error / theirs:7.4f}"
            print(line, flush=True)
    return worse


def seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread, the best of three after a first that may compile: what other work there is does not count."""
    work()
    best = np.inf
    for _ in range(3):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return float(best)


def groups() -> bool:
    """Prints what larger groups of IQ4_NL cost; whether that is far from what it must be."""
    rows = (np.random.default_rng(0).standard_normal((512, 2048)) * 0.02).astype(np.float32)
    errors = {}
    for size in (32, *GROUP_LIMITS):
        errors[size] = relative_error("iq4_nl", KERNELS["iq4_nl"](rows, group_size=size), rows, None, plain=True)
    shown = ", ".join(f"{size}: {errors[size]:.5f} ({errors[size] / errors[32] - 1:+.1%})" for size in errors)
    print(f"\nIQ4_NL whose blocks share scales over groups, Gaussian weights, plain relative error: {shown}; limits {GROUP_LIMITS}")
    return not all(low < errors[size] / errors[32] < high for size, (low, high) in GROUP_LIMITS.items())


def main() -> int:
    failed = [title for title, check in (("errors", errors), ("efforts", efforts), ("groups", groups)) if check()]
    print(f"\nbeyond their limits: {', '.join(failed)}" if failed else "\nall within their limits")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
