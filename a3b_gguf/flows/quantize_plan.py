"""What `a3b quantize` will write, before it writes: source, edits, importance, types, and the layout of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from a3b_gguf.clip_bounds import FILE_NAME
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.flows.models import open_model
from a3b_gguf.flows.protection import protected
from a3b_gguf.flows.quantize_options import Options, check_flags
from a3b_gguf.gguf_write import OutputFile, lay_out, refuse_same_file
from a3b_gguf.metadata import Metadata
from a3b_gguf.part import written
from a3b_gguf.split import SHARD, read_parts
from a3b_gguf.tensors import Model
from a3b_quantize.assign import Assignment, refuse_unweighted
from a3b_quantize.edits import Edited, edit
from a3b_quantize.encode import jobs
from a3b_quantize.experts import pruned_imatrix
from a3b_quantize.fit_imatrix import fit_imatrix, without_entry
from a3b_quantize.imatrix import Imatrix, read_imatrix
from a3b_quantize.importance import ImportanceOptions, importance_of
from a3b_quantize.kernels import BLOCK
from a3b_quantize.metadata import imatrix_metadata, quantized_metadata
from a3b_quantize.policy import Policy, choose_policy
from a3b_quantize.requantize import decoded, refuse_changed, refuse_quantized
from a3b_quantize.rule import subjects_of
from a3b_quantize.weighting import Importance

FLOAT_SUFFIXES = ("-bf16", "-f16", "-f32", ".bf16", ".f16", ".f32")


@dataclass(frozen=True, slots=True)
class Weights:
    """What an importance matrix says about a model. imatrix: its entries fitted to the model's tensors; digest: sha256 of the file.

    metadata: what the output says about it; notes: experts without data, entries without a tensor.
    """

    imatrix: Imatrix
    importance: Importance = field(repr=False)
    digest: str
    metadata: Metadata
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A model ready to be quantized, its edits made. files: what it is read from; weights: None without an importance matrix."""

    model: Model
    files: tuple[Path, ...]
    weights: Weights | None
    notes: tuple[str, ...]

    @property
    def importance(self) -> Importance:
        return self.weights.importance if self.weights else {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that will be written. key: changes with all that the bytes depend on, besides the headers."""

    source: Source
    policy: Policy
    assignments: tuple[Assignment, ...]
    files: tuple[OutputFile, ...]
    notes: tuple[str, ...]
    key: bytes


def prepare(path: Path, output: Path | None, options: Options) -> Prepared:
    """Decides everything and writes nothing. Raises UsageError or BadInput."""
    policy = choose_policy(options.choice)  # before the source: a wrong type is said at once
    check_flags(options)
    if policy.copies and options.imatrix_path and not policy.rules:
        raise UsageError("--type copy changes no tensor, so an importance matrix has no use", "leave it out, or add --tensor-type")
    return prepare_with(open_source(path, options, policy), policy, output or default_output(path, policy), options, protect=True)


def prepare_with(source: Source, policy: Policy, output: Path, options: Options, protect: bool = False) -> Prepared:
    """As `prepare`, for a source that is open. protect: whether measured ranges may change types."""
    model, weights = source.model, source.weights
    assigned = policy.assign(model, weights is not None)
    if protect and not policy.copies:
        assigned = protected(assigned, model, options)
    assignments = assigned.assignments
    _check_group_sizes(assignments, options)
    refuse_unweighted(assignments, policy.file_type_name, source.importance)
    notes = refuse_changed(model, assignments, options.allow_requantize) if policy.copies else ()
    metadata = quantized_metadata(model.metadata, policy, assignments) | (weights.metadata if weights else {})
    files = lay_out(output, metadata, jobs(model, assignments, options.encoding, source.importance), options.max_shard_bytes)
    _check_outputs([file.path for file in files], (*source.files, *options.inputs), options)
    notes = (*source.notes, *notes, *_unweighted(source, assignments), *assigned.notes)
    return Prepared(source, policy, assignments, files, notes, _key(source, assignments, options))


def open_source(path: Path, options: Options, policy: Policy) -> Source:
    """The model with its edits made, and its importance. Raises BadInput for a source that is quantized, unless that is allowed."""
    model = open_model(path)
    if not policy.copies:
        _refuse_no_model(path, model)
    notes = () if policy.copies else refuse_quantized(model, options.allow_requantize)
    edited = edit(decoded(model), options.edits)
    files = tuple(filter(Path.is_file, path.iterdir())) if path.is_dir() else tuple(part.path for part in read_parts(path))
    weights = read_weights(edited, options.imatrix_path, plain=options.stock) if options.imatrix_path else None
    return Source(edited.model, files, weights, (*edited.model.notes, *notes, *(weights.notes if weights else ())))


def _refuse_no_model(path: Path, model: Model) -> None:
    """Raises BadInput for a file that is part of a model or about one: the choice of types is made for whole language models."""
    field = model.metadata.get("general.type")
    kind = "mmproj" if model.architecture == "clip" else "model" if field is None else str(field.value)
    if kind != "model":
        raise BadInput(f"{path} is of general.type {kind!r}, expected a model", "give the model's own file; --type copy takes any")
    if not model.tensors:
        raise BadInput(f"{path} holds no tensors", "give a file with the model's weights; this may be a vocabulary alone")


def read_weights(edited: Edited, path: Path, plain: bool) -> Weights:
    """The importance matrix at `path`, fitted to a model. plain: as llama-quantize uses it. Raises BadInput for one of another model."""
    whole = read_imatrix(path)
    fitted = fit_imatrix(pruned_imatrix(whole, edited.pruned) if edited.pruned else whole, edited.model)
    importance = importance_of(fitted.imatrix, edited.model, ImportanceOptions(plain=plain))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Weights(fitted.imatrix, importance, digest, imatrix_metadata(path, whole), fitted.notes)


def default_output(source: Path, policy: Policy) -> Path:
    """`<stem>-<TYPE>.gguf` in the current folder, without what the source's name says of parts and, unless they stay, of float types."""
    shard = SHARD.fullmatch(source.name)
    stem = source.resolve().name if source.is_dir() else shard[1] if shard else source.stem
    for suffix in () if policy.copies else FLOAT_SUFFIXES:
        if stem.lower().endswith(suffix):
            stem = stem[: -len(suffix)]
            break
    name = policy.name.removeprefix("stock:")
    return Path(f"{stem}-{name if policy.copies else name.upper()}.gguf")


def _unweighted(source: Source, assignments: Sequence[Assignment]) -> tuple[str, ...]:
    """A note about tensors that are quantized without importance although there is an importance matrix."""
    if source.weights is None:
        return ()
    changed = [each.name for each in assignments if each.type != each.source and not each.type.is_float]
    return without_entry(source.weights.imatrix, changed, subjects_of(source.model).n_layer)


def _check_group_sizes(assignments: Sequence[Assignment], options: Options) -> None:
    grouped = next((each for each in assignments if each.group_size != BLOCK), None)
    if grouped and options.encoder == "ggml":
        raise UsageError(f"group size {grouped.group_size} of {grouped.name}: ggml's kernels know only {BLOCK}", "add --kernel fast")


def _check_outputs(outputs: Sequence[Path], inputs: Sequence[Path], options: Options) -> None:
    for output in outputs:
        written(output)
        if output.name == FILE_NAME:
            raise UsageError(f"the output cannot be called {FILE_NAME}: the activation ranges get that name", "choose another name with -o")
    if options.report is None:
        refuse_same_file(outputs, inputs)
        return
    if not written(options.report, "--report:").parent.is_dir():
        raise UsageError(f"--report: {options.report} is not a file in a folder that exists", "name a file")
    if options.report.resolve() in [output.resolve() for output in outputs]:
        raise UsageError(f"--report: {options.report} is the output", "choose another name")
    refuse_same_file((*outputs, options.report), inputs)


def _key(source: Source, assignments: Sequence[Assignment], options: Options) -> bytes:
    """What the tensors' bytes depend on and the header does not say."""
    types = repr([(each.name, each.type.name, each.group_size) for each in assignments])
    pruned = hashlib.sha256(options.prune.read_bytes()).hexdigest() if options.prune else ""
    weights = f"{source.weights.digest} {options.stock}" if source.weights else ""
    return fingerprint(source.files, "quantize", options.encoder, str(options.encoding.effort), types, pruned, weights)
