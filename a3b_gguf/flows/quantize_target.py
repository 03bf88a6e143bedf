"""`a3b quantize --target-size | --target-bpw` from end to end: allocate, then as any other quantization."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic

from a3b_gguf.flows.allocate import Target, Tell, check_target, prepare_allocated
from a3b_gguf.flows.bounds import Measured, measure_bounds
from a3b_gguf.flows.quantize import Quantized, planned, run
from a3b_gguf.flows.quantize_options import Options, check_flags
from a3b_gguf.gguf_write import Progress
from a3b_quantize.kernels import make_ready

LONG_SECONDS = 60.0  # of a step, beyond which its end is told early


def quantize_to_target(
    source: Path,
    output: Path | None,
    options: Options,
    target: Target,
    progress: Callable[[], AbstractContextManager[Progress | None]] = nullcontext,
    measure: Callable[[Path], Measured] = measure_bounds,
    say: Callable[[str], None] | None = None,
) -> Quantized:
    """As `quantize_file`, with the types that lose least in the target's bytes. Writes the policy beside the output.

    progress: opened when the writing begins, so that its rate is that of writing.
    """
    ready(options, target, say)
    prepared, allocation = prepare_allocated(source, output, options, target, write=True, shown=_steps(say))
    with progress() as tell:
        return replace(run(prepared, options, tell, measure, say), allocation=allocation)


def plan_to_target(
    source: Path, output: Path | None, options: Options, target: Target, say: Callable[[str], None] | None = None
) -> Quantized:
    """The same without writing: types, exact size and predicted loss."""
    ready(options, target, say)
    prepared, allocation = prepare_allocated(source, output, options, target, write=False, shown=_steps(say))
    return replace(planned(prepared), allocation=allocation)


def ready(options: Options, target: Target, say: Callable[[str], None] | None) -> None:
    """Compiles the kernels that weighing needs; `say` is told before. Raises UsageError for what would make that useless."""
    check_target(target)
    check_flags(options)
    if options.encoder == "fast":
        make_ready(set(target.candidates), say or (lambda text: None))


def _steps(say: Callable[[str], None] | None) -> Callable[[str], Tell]:
    """Tells of each step every tenth of the way, and after its first tensor when it will take long."""

    def begin(what: str) -> Tell:
        told: list[int] = []
        first: list[tuple[int, float]] = []  # done and when: the clock runs from there, since the first step also loads what all need

        def tell(done: int, total: int) -> None:
            now, tenth = monotonic(), 10 * done // total
            if not first:
                first.append((done, now))
                told.append(tenth)
                return
            left = (now - first[0][1]) / (done - first[0][0]) * (total - done)
            if say is not None and (tenth > told[0] or (done == first[0][0] + 1 and left > LONG_SECONDS)):
                told[0] = tenth
                say(f"{what}: {100 * done // total} %, {done} of {total} tensors, {_duration(left)} left")

        return tell

    return begin


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
