"""`a3b quantize` from end to end: decide, encode, write, measure, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from a3b_gguf.flows.allocate import Allocation
from a3b_gguf.flows.bounds import Measured, measure_bounds
from a3b_gguf.flows.quantize_options import Options as Options
from a3b_gguf.flows.quantize_options import refuse_unwritable
from a3b_gguf.flows.quantize_plan import Prepared, prepare
from a3b_gguf.flows.quantize_plan import default_output as default_output
from a3b_gguf.flows.quantize_report import Report, write_report
from a3b_gguf.flows.weight_rate import WeightRate
from a3b_gguf.gguf_write import FileLine, Progress, file_lines, write_files
from a3b_quantize.assign import Assignment
from a3b_quantize.kernels import make_ready


@dataclass(frozen=True, slots=True)
class Share:
    """The tensors of one role that become one type with one group size."""

    role: str
    type: str
    group_size: int
    tensors: int
    weights: int
    nbytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class TensorLine:
    """What one tensor becomes, and why."""

    name: str
    source: str
    type: str
    group_size: int
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written, or with a dry run would be. fell_back: tensors whose rows did not fit their type.

    path: the file, or the first of `files`; nbytes: of all of them; report: the errors, when they were asked for; allocation: how the types
    were chosen for a target size.
    """

    path: Path
    files: tuple[FileLine, ...]
    policy: str
    description: str
    nbytes: int
    bits_per_weight: float
    shares: tuple[Share, ...]
    fell_back: tuple[Assignment, ...]
    notes: tuple[str, ...]
    bounds: Path | None
    written: bool
    tensors: tuple[TensorLine, ...] = field(default=(), repr=False)
    report: Report | None = None
    allocation: Allocation | None = None


def quantize_file(
    source: Path,
    output: Path | None,
    options: Options,
    progress: Progress | None = None,
    measure: Callable[[Path], Measured] = measure_bounds,
    say: Callable[[str], None] | None = None,
) -> Quantized:
    """Quantizes a checkpoint folder or a GGUF into `output` (default: `default_output`) and measures the result.

    What an interrupted run with the same source and options left in the `.part` is continued. Raises BadInput, UsageError or
    MachineLacks, and then nothing stands under the final name. What goes wrong in measuring is a note. `say` is told when kernels
    have to be compiled first.
    """
    return run(prepare(source, output, options), options, progress, measure, say)


def run(
    prepared: Prepared,
    options: Options,
    progress: Progress | None = None,
    measure: Callable[[Path], Measured] = measure_bounds,
    say: Callable[[str], None] | None = None,
) -> Quantized:
    """Writes what was prepared; as `quantize_file`."""
    for path in filter(None, (prepared.files[0].path, options.report)):
        refuse_unwritable(path)
    if options.encoder == "fast":
        make_ready({each.type.name for each in prepared.assignments if each.type != each.source}, say or (lambda text: None))
    notes = write_files(prepared.files, progress and WeightRate(progress, prepared.assignments), prepared.key)
    measured = measure(prepared.files[0].path) if options.bounds else Measured(None, ())
    if options.report and say:
        say("comparing what was written with the source")
    report = write_report(options.report, prepared, options.encoding, progress) if options.report else None
    return _result(prepared, measured, notes, report, written=True)


def plan_quantize(source: Path, output: Path | None, options: Options) -> Quantized:
    """The same without writing: the table, and the exact size of each file."""
    return planned(prepare(source, output, options))


def planned(prepared: Prepared) -> Quantized:
    """What was prepared, without writing it."""
    return _result(prepared, Measured(None, ()), (), None, written=False)


def _result(prepared: Prepared, measured: Measured, notes: Sequence[str], report: Report | None, written: bool) -> Quantized:
    assignments = prepared.assignments
    weights = sum(each.n_weights for each in assignments)
    return Quantized(
        path=prepared.files[0].path,
        files=file_lines(prepared.files),
        policy=prepared.policy.name,
        description=prepared.policy.description,
        nbytes=sum(file.n_bytes for file in prepared.files),
        bits_per_weight=8 * sum(each.nbytes for each in assignments) / weights if weights else 0.0,
        shares=shares(assignments),
        fell_back=tuple(each for each in assignments if each.fell_back),
        notes=(*prepared.notes, *notes, *measured.notes),
        bounds=measured.path,
        written=written,
        tensors=tuple(TensorLine(e.name, e.source.name, e.type.name, e.group_size, e.nbytes, e.reason) for e in assignments),
        report=report,
    )


def shares(assignments: Sequence[Assignment]) -> tuple[Share, ...]:
    """The assignments by role, type and group size, largest first."""
    groups: dict[tuple[str, str, int], list[Assignment]] = {}
    for each in assignments:
        groups.setdefault((each.role, each.type.name, each.group_size), []).append(each)
    rows = [
        Share(*key, len(group), n := sum(e.n_weights for e in group), size := sum(e.nbytes for e in group), 8 * size / n)
        for key, group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda share: -share.nbytes))
