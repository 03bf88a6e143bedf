"""`a3b quantize` from end to end: open, assign, encode, write, measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.errors import UsageError
from a3b_gguf.flows.bounds import Measured, measure_bounds
from a3b_gguf.flows.models import open_model
from a3b_gguf.gguf_write import Progress, file_size, refuse_same_file, write_gguf
from a3b_gguf.metadata import Metadata
from a3b_gguf.tensors import Model, TensorJob
from a3b_quantize.assign import Assignment, refuse_quantized, refuse_unweighted
from a3b_quantize.bounds import FILE_NAME
from a3b_quantize.encode import KERNELS, jobs
from a3b_quantize.metadata import quantized_metadata
from a3b_quantize.mtp import without_mtp
from a3b_quantize.policy import Policy, find_policy

FLOAT_SUFFIXES = ("-bf16", "-f16", "-f32", ".bf16", ".f16", ".f32")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. threads: all cores when None; bounds: whether to measure; mtp: whether to keep the MTP block."""

    type_name: str
    stock: bool = False
    kernel: str = "ggml"
    threads: int | None = None
    mtp: bool = True
    bounds: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """The tensors of one role that become one type."""

    role: str
    type: str
    tensors: int
    weights: int
    nbytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written, or with a dry run would be. nbytes: of the file; fell_back: tensors whose rows did not fit their type."""

    path: Path
    policy: str
    description: str
    nbytes: int
    bits_per_weight: float
    shares: tuple[Share, ...]
    fell_back: tuple[Assignment, ...]
    notes: tuple[str, ...]
    bounds: Path | None
    written: bool


@dataclass(frozen=True, slots=True)
class _Prepared:
    model: Model
    policy: Policy
    metadata: Metadata
    assignments: tuple[Assignment, ...]
    jobs: Sequence[TensorJob]


def quantize_file(
    source: Path,
    output: Path | None,
    options: Options,
    progress: Progress | None = None,
    measure: Callable[[Path], Measured] = measure_bounds,
) -> Quantized:
    """Quantizes a checkpoint folder or a GGUF into `output` (default: `default_output`) and measures the result.

    Raises BadInput, UsageError or MachineLacks, and then nothing stands under the final name. What goes wrong in measuring is a note.
    """
    prepared = _prepare(source, options)
    output = _checked(source, output or default_output(source, prepared.policy))
    write_gguf(output, prepared.metadata, prepared.jobs, progress)
    measured = measure(output) if options.bounds else Measured(None, ())
    return _result(prepared, output, measured, written=True)


def plan_quantize(source: Path, output: Path | None, options: Options) -> Quantized:
    """The same without writing: the table, and the exact size of the file."""
    prepared = _prepare(source, options)
    return _result(prepared, _checked(source, output or default_output(source, prepared.policy)), Measured(None, ()), written=False)


def default_output(source: Path, policy: Policy) -> Path:
    """`<stem>-<TYPE>.gguf` in the current folder; a stem that ends in a float type loses it."""
    stem = source.resolve().name if source.is_dir() else source.stem
    for suffix in FLOAT_SUFFIXES:
        if stem.lower().endswith(suffix):
            stem = stem[: -len(suffix)]
            break
    return Path(f"{stem}-{policy.name.removeprefix('stock:').upper()}.gguf")


def _prepare(source: Path, options: Options) -> _Prepared:
    policy = find_policy(options.type_name, options.stock)  # before the source: a wrong type is said at once
    if options.kernel not in KERNELS:
        raise UsageError(f"--kernel: there is no {options.kernel!r}", f"known: {', '.join(KERNELS)}")
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads: {options.threads} is not a number of threads", "it must be at least 1")
    model = open_model(source)
    refuse_quantized(model)
    if not options.mtp:
        model = without_mtp(model)
    assignments = policy.assign(model)
    refuse_unweighted(assignments, policy.file_type_name)
    return _Prepared(
        model, policy, quantized_metadata(model.metadata, policy), assignments, jobs(model, assignments, options.threads, options.kernel)
    )


def _checked(source: Path, output: Path) -> Path:
    if output.is_dir():
        raise UsageError(f"the output {output} is a folder", "name a file with -o")
    if output.name == FILE_NAME:
        raise UsageError(f"the output cannot be called {FILE_NAME}: the activation ranges get that name", "choose another name with -o")
    refuse_same_file(output, source.iterdir() if source.is_dir() else [source])
    return output


def _result(prepared: _Prepared, output: Path, measured: Measured, written: bool) -> Quantized:
    assignments = prepared.assignments
    weights = sum(each.n_weights for each in assignments)
    return Quantized(
        path=output,
        policy=prepared.policy.name,
        description=prepared.policy.description,
        nbytes=file_size(prepared.metadata, prepared.jobs),
        bits_per_weight=8 * sum(each.nbytes for each in assignments) / weights if weights else 0.0,
        shares=shares(assignments),
        fell_back=tuple(each for each in assignments if each.fell_back),
        notes=(*prepared.model.notes, *measured.notes),
        bounds=measured.path,
        written=written,
    )


def shares(assignments: Sequence[Assignment]) -> tuple[Share, ...]:
    """The assignments by role and type, largest first."""
    groups: dict[tuple[str, str], list[Assignment]] = {}
    for each in assignments:
        groups.setdefault((each.role, each.type.name), []).append(each)
    rows = [
        Share(role, kind, len(group), n := sum(e.n_weights for e in group), size := sum(e.nbytes for e in group), 8 * size / n)
        for (role, kind), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda share: -share.nbytes))
