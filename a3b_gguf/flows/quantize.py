"""`a3b quantize` from end to end: open, assign, encode, write, measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.errors import UsageError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.flows.bounds import Measured, measure_bounds
from a3b_gguf.flows.models import open_model
from a3b_gguf.gguf_write import FileLine, OutputFile, Progress, file_lines, lay_out, refuse_same_file, write_files
from a3b_gguf.split import read_parts
from a3b_gguf.tensors import Model
from a3b_quantize.assign import Assignment, refuse_quantized, refuse_unweighted
from a3b_quantize.bounds import FILE_NAME
from a3b_quantize.encode import KERNELS, jobs
from a3b_quantize.kernels import make_ready
from a3b_quantize.metadata import quantized_metadata
from a3b_quantize.mtp import without_mtp
from a3b_quantize.policy import Policy, find_policy

FLOAT_SUFFIXES = ("-bf16", "-f16", "-f32", ".bf16", ".f16", ".f32")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. threads: all cores when None; bounds: whether to measure; mtp: whether to keep the MTP block.

    max_shard_bytes: write several files of at most this size. kernel: fast when None, but ggml with stock, for llama-quantize's bytes.
    """

    type_name: str
    stock: bool = False
    kernel: str | None = None
    threads: int | None = None
    mtp: bool = True
    bounds: bool = True
    max_shard_bytes: int | None = None

    @property
    def encoder(self) -> str:
        return self.kernel or ("ggml" if self.stock else "fast")


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
    """What was written, or with a dry run would be. fell_back: tensors whose rows did not fit their type.

    path: the file, or the first of `files`; nbytes: of all of them.
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


@dataclass(frozen=True, slots=True)
class _Prepared:
    model: Model
    policy: Policy
    assignments: tuple[Assignment, ...]
    sources: tuple[Path, ...]
    files: tuple[OutputFile, ...]


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
    prepared = _prepare(source, output, options)
    if options.encoder == "fast":
        make_ready({each.type.name for each in prepared.assignments if each.type != each.source}, say or (lambda text: None))
    notes = write_files(prepared.files, progress, fingerprint(prepared.sources, "quantize", options.encoder))
    measured = measure(prepared.files[0].path) if options.bounds else Measured(None, ())
    return _result(prepared, measured, notes, written=True)


def plan_quantize(source: Path, output: Path | None, options: Options) -> Quantized:
    """The same without writing: the table, and the exact size of each file."""
    return _result(_prepare(source, output, options), Measured(None, ()), (), written=False)


def default_output(source: Path, policy: Policy) -> Path:
    """`<stem>-<TYPE>.gguf` in the current folder; a stem that ends in a float type loses it."""
    stem = source.resolve().name if source.is_dir() else source.stem
    for suffix in FLOAT_SUFFIXES:
        if stem.lower().endswith(suffix):
            stem = stem[: -len(suffix)]
            break
    return Path(f"{stem}-{policy.name.removeprefix('stock:').upper()}.gguf")


def _prepare(source: Path, output: Path | None, options: Options) -> _Prepared:
    policy = find_policy(options.type_name, options.stock)  # before the source: a wrong type is said at once
    if options.encoder not in KERNELS:
        raise UsageError(f"--kernel: there is no {options.encoder!r}", f"known: {', '.join(KERNELS)}")
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads: {options.threads} is not a number of threads", "it must be at least 1")
    model = open_model(source)
    refuse_quantized(model)
    if not options.mtp:
        model = without_mtp(model)
    assignments = policy.assign(model)
    refuse_unweighted(assignments, policy.file_type_name)
    metadata = quantized_metadata(model.metadata, policy)
    todo = jobs(model, assignments, options.threads, options.encoder)
    files = lay_out(output or default_output(source, policy), metadata, todo, options.max_shard_bytes)
    sources = tuple(filter(Path.is_file, source.iterdir())) if source.is_dir() else tuple(part.path for part in read_parts(source))
    _check_outputs([file.path for file in files], sources)
    return _Prepared(model, policy, assignments, sources, files)


def _check_outputs(outputs: Sequence[Path], sources: Sequence[Path]) -> None:
    for output in outputs:
        if output.is_dir():
            raise UsageError(f"the output {output} is a folder", "name a file with -o")
        if output.name == FILE_NAME:
            raise UsageError(f"the output cannot be called {FILE_NAME}: the activation ranges get that name", "choose another name with -o")
    refuse_same_file(outputs, sources)


def _result(prepared: _Prepared, measured: Measured, notes: Sequence[str], written: bool) -> Quantized:
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
        notes=(*prepared.model.notes, *notes, *measured.notes),
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
