"""Checkpoint folder -> GGUF file: which type each tensor gets, and its bytes a few MiB at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_convert.floats import F16_OVERFLOW, first_nonfinite, to_bf16
from a3b_convert.model import FILE_TYPES, Mtp, main_type, read_model
from a3b_convert.placed import PlacedTensor
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.gguf_write import FileLine, OutputFile, Progress, file_lines, lay_out, refuse_same_file, write_files
from a3b_gguf.metadata import u32
from a3b_gguf.part import written
from a3b_gguf.tensors import TYPES, GGMLType, TensorJob, n_rows

READ_SUFFIXES = (".safetensors", ".json", ".jinja", ".md")
FLOAT_TYPES = ("auto", "bf16", "f16", "f32", "q8_0")
Q8_0_OVERFLOW = 127 * F16_OVERFLOW  # the scale of a block is its largest value / 127, in f16
CHUNK_BYTES = 1 << 20  # of stored values: fits into a processor's cache, so the check for NaN costs little
CHUNKS_AHEAD = 4  # chunks that are read while one is written
CHUNK_VALUES = 1 << 19  # of values that go through float32


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor of the output. source_type: in the checkpoint. n_bytes: in the output, without padding."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    type: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """Everything that is known before the first byte is written. n_bytes: of all files, exactly."""

    architecture: str
    type: str
    tensors: tuple[TensorLine, ...]
    n_bytes: int
    files: tuple[FileLine, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. path: the file, or the first of `files`; n_bytes: of all; types: how many tensors have each type."""

    path: Path
    architecture: str
    type: str
    n_bytes: int
    files: tuple[FileLine, ...]
    n_tensors: int
    types: dict[str, int]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    files: tuple[OutputFile, ...]
    facts: Conversion


def prepare(
    folder: Path,
    output: Path | None = None,
    *,
    float_type: str = "auto",
    mtp: Mtp = True,
    chat_template: Path | None = None,
    max_shard_bytes: int | None = None,
) -> Conversion:
    """What `convert` would write, tensor by tensor, and the exact size of each file. Raises what `convert` raises before it writes."""
    return _prepare(folder, output, float_type, mtp, chat_template, max_shard_bytes).facts


def convert(
    folder: Path,
    output: Path | None = None,
    *,
    float_type: str = "auto",
    mtp: Mtp = True,
    chat_template: Path | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Writes the checkpoint in `folder` as a GGUF file; without `output` as FOLDER-TYPE.gguf in the current folder.

    float_type: "auto" keeps each tensor's own type, FP8 becomes bf16; the others cast every tensor that llama.cpp does not want in
    F32. max_shard_bytes: write several files of at most this size. What an interrupted run with the same input and options left in the
    `.part` is continued. Raises BadInput, UsageError or MachineLacks; then nothing stands under the output's name.
    """
    prepared = _prepare(folder, output, float_type, mtp, chat_template, max_shard_bytes)
    facts, files = prepared.facts, prepared.files
    notes = write_files(files, progress, fingerprint(_read_files(folder), "convert"))
    types = dict(Counter(line.type for line in facts.tensors).most_common())
    path = files[0].path
    return Converted(path, facts.architecture, facts.type, facts.n_bytes, facts.files, len(facts.tensors), types, facts.notes + notes)


def _read_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in READ_SUFFIXES and path.is_file()]


def _check_outputs(folder: Path, outputs: Sequence[Path], chat_template: Path | None) -> None:
    """Refuses to write over what is read; a GGUF in the checkpoint's folder is no input."""
    for output in outputs:
        written(output)
    if folder.is_dir():
        refuse_same_file(outputs, _read_files(folder))
    if chat_template is not None:
        refuse_same_file(outputs, [chat_template])


def _prepare(
    folder: Path, output: Path | None, float_type: str, mtp: Mtp, chat_template: Path | None, max_shard_bytes: int | None
) -> _Prepared:
    if output is not None:
        _check_outputs(folder, [output], chat_template)
    if float_type not in FLOAT_TYPES:
        raise UsageError(f"there is no type {float_type!r} to convert to", f"known: {', '.join(FLOAT_TYPES)}; smaller ones: a3b quantize")
    metadata, tensors, notes = read_model(folder, mtp, chat_template, float_type)
    name = main_type(tensors) if float_type == "auto" else float_type
    metadata["general.file_type"] = u32(FILE_TYPES[name])
    kinds = [_choose(tensor, float_type, notes) for tensor in tensors]
    jobs = [_job(tensor, kind) for tensor, kind in zip(tensors, kinds, strict=True)]
    lines = tuple(
        TensorLine(job.name, job.shape, tensor.source_dtype, job.type.name, job.nbytes) for tensor, job in zip(tensors, jobs, strict=True)
    )
    default = f"{'mtp-' if mtp == 'only' else ''}{folder.resolve().name}-{name.upper()}.gguf"
    files = lay_out(output or Path(default), metadata, jobs, max_shard_bytes)
    _check_outputs(folder, [file.path for file in files], chat_template)
    n_bytes = sum(file.n_bytes for file in files)
    facts = Conversion(str(metadata["general.architecture"].value), name, lines, n_bytes, file_lines(files), tuple(notes))
    return _Prepared(files, facts)


def _choose(tensor: PlacedTensor, float_type: str, notes: list[str]) -> GGMLType:
    """The tensor's type in the output; a fallback is put down in `notes`."""
    kind = tensor.type if float_type == "auto" or tensor.always_f32 else TYPES[float_type]
    if tensor.shape[-1] % kind.block:
        notes.append(f"{tensor.name}: rows of {tensor.shape[-1]} are no whole blocks of {kind.name}, written as f16")
        kind = TYPES["f16"]
    if kind.name == "f16" and tensor.type.name != "f16" and _overflows_f16(tensor):
        notes.append(f"{tensor.name}: values beyond f16's 65504, written as bf16")
        kind = TYPES["bf16"]
    return kind


def _overflows_f16(tensor: PlacedTensor) -> bool:
    return any(bool((np.abs(rows) >= F16_OVERFLOW).any()) for rows in _row_chunks(tensor))


def _job(tensor: PlacedTensor, kind: GGMLType) -> TensorJob:
    chunks = (lambda: _raw_chunks(tensor)) if kind == tensor.type else (lambda: _encoded_chunks(tensor, kind))
    return TensorJob(tensor.name, tensor.shape, kind, chunks)


def _raw_chunks(tensor: PlacedTensor) -> Iterator[bytes | memoryview]:
    """The tensor's bytes in order. A thread reads and checks the next chunks while the caller writes one."""
    step = max(CHUNK_BYTES // tensor.type.row_bytes(tensor.shape[-1]), 1)
    total = n_rows(tensor.shape)
    spans = ((start, min(start + step, total)) for start in range(0, total, step))
    with ThreadPoolExecutor(1, thread_name_prefix="read") as pool:
        ahead = deque(pool.submit(tensor.raw, *span) for span in islice(spans, CHUNKS_AHEAD))
        while ahead:
            chunk = ahead.popleft().result()
            ahead.extend(pool.submit(tensor.raw, *span) for span in islice(spans, 1))
            yield chunk


def _row_chunks(tensor: PlacedTensor) -> Iterator[NDArray[np.float32]]:
    step = max(CHUNK_VALUES // tensor.shape[-1], 1)
    total = n_rows(tensor.shape)
    for start in range(0, total, step):
        yield tensor.rows(start, min(start + step, total))


def _encoded_chunks(tensor: PlacedTensor, kind: GGMLType) -> Iterator[memoryview]:
    for rows in _row_chunks(tensor):
        data = _encode(rows, kind).data.cast("B")
        if first_nonfinite(data, kind) is not None if kind.is_float else np.abs(rows).max() >= Q8_0_OVERFLOW:
            raise BadInput(f"tensor {tensor.name} has values that are too large for {kind.name}", "convert with --type f32")
        yield data


def _encode(rows: NDArray[np.float32], kind: GGMLType) -> NDArray[np.generic]:
    """float32 rows as `kind`, one of FLOAT_TYPES."""
    if kind.name == "f32":
        return np.ascontiguousarray(rows)
    if kind.name == "bf16":
        return to_bf16(rows)
    if kind.name == "f16":
        with np.errstate(over="ignore"):  # the caller looks at the result
            return rows.astype(np.float16)
    from a3b_gguf.llama.ggml import quantize_chunk  # loads llama.cpp's library

    return quantize_chunk(kind, rows)
