"""Sensitivities for an allocation: measured on the model itself when it is small enough or when that is asked for, and kept for the next
budget; else estimated from the calibration; without one, from the table."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, Interrupted, MachineLacks, UsageError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.flows.calibrate import renderer
from a3b_gguf.flows.card import copy_job
from a3b_gguf.flows.protection import measured_ranges
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.flows.quantize_plan import Source
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.units import GIB, MIB, human_bytes
from a3b_gguf.user_cache import cache_folder
from a3b_quantize.assign import Assignment
from a3b_quantize.calibration_data import BUILTIN, chunks, read_sources
from a3b_quantize.edits import Edits
from a3b_quantize.encode import usable_cores
from a3b_quantize.rule import subjects_of
from a3b_quantize.sensitivity import Sensitivities, from_table, measure, read_sensitivities, write_sensitivities
from a3b_quantize.sensitivity_estimate import estimated

WISHES = ("auto", "measure", "estimate", "table")
AUTO_BYTES = 2 * GIB  # weights of a model that is measured unasked: about a minute for each 100 MiB and core
MARGIN = 1 * GIB
N_CTX = 512
CHUNKS = ((256 * MIB, 12), (2 * GIB, 4))  # up to so many bytes of weights, so many chunks are predicted for each tensor
LEAST_CHUNKS = 2
SAVE_SECONDS = 20.0
UNFINISHED = ".unfinished"


def sensitivities(
    source: Source,
    groups: Sequence[Sequence[Assignment]],
    options: Options,
    wish: str,
    data: Sequence[str],
    tell: Callable[[int, int], None],
) -> Sensitivities:
    """Of every tensor of `groups`. wish: one of WISHES; data: texts to predict, the built-in calibration text when empty.

    What was measured before is used for `auto` too, whatever the size. Raises MachineLacks when `measure` is asked for and the model does
    not fit into memory, UsageError when `estimate` is and there are no ranges, Interrupted when measuring is stopped.
    """
    n_bytes = sum(tensor.type.nbytes(tensor.shape) for tensor in source.model.tensors)
    names = [each.name for group in groups for each in group]
    needs, free = n_bytes + MARGIN, int(psutil.virtual_memory().available)
    kept = cache_folder() / "sensitivity" / f"{_key(source, options, data)}.json"
    found = read_sensitivities(kept) if wish in ("auto", "measure") else None
    if found is not None:
        return found
    if wish == "measure" and needs > free:
        raise MachineLacks(
            f"measuring sensitivity needs {human_bytes(needs)} of memory, {human_bytes(free)} are free",
            "take --sensitivity estimate, which runs nothing and needs --calibration DIR",
        )
    if wish in ("estimate", "table") or (wish == "auto" and (n_bytes > AUTO_BYTES or needs > free)):
        return _not_measured(source, names, options, wish)
    try:
        found = _measured(source, names, options, data, kept, tell)
    except BadInput as error:
        if wish == "measure":
            raise
        other = _not_measured(source, names, options, wish)
        return replace(other, how=f"{other.how}, since the model cannot be run: {error.message}")
    write_sensitivities(kept, found)
    return found


def weighting(source: Source, name: str) -> tuple[NDArray[np.float32] | None, NDArray[np.float64] | None]:
    """Importance [n_mat, cols] of a tensor, and how often each of its matrices is used [n_mat]; None where nothing is known."""
    entry = source.weights.imatrix.entries.get(name) if source.weights else None
    usage = None if entry is None or not entry.counts.sum() else (entry.counts / entry.counts.sum()).astype(np.float64)
    return source.importance.get(name), usage


def _not_measured(source: Source, names: Sequence[str], options: Options, wish: str) -> Sensitivities:
    """Estimated from the ranges of --calibration where there are any, else from the table."""
    n_layer = subjects_of(source.model).n_layer
    bounds = None if wish == "table" else measured_ranges(options, source.model)
    if bounds is not None:
        used = source.model.metadata.get(f"{source.model.architecture}.expert_used_count")
        n_used = int(used.value) if used else 1
        found = estimated(source.model.tensors, names, partial(weighting, source), bounds, n_used)
        if any(name.startswith("blk.") for name in found.values):
            return found
    if wish == "estimate":
        raise UsageError(
            "--sensitivity estimate needs --calibration DIR with an imatrix.gguf and a clip_bounds.bin of this model",
            "make them with `a3b calibrate MODEL.gguf -o DIR`",
        )
    return from_table(names, n_layer)


def _measured(
    source: Source, names: Sequence[str], options: Options, data: Sequence[str], kept: Path, tell: Callable[[int, int], None]
) -> Sensitivities:
    """Measured in memory; what an earlier run with the same key had done is not done again."""
    wanted, unfinished = set(names), kept.with_suffix(UNFINISHED)
    n_bytes = sum(tensor.type.nbytes(tensor.shape) for tensor in source.model.tensors)
    n_chunk = next((count for size, count in CHUNKS if n_bytes <= size), LEAST_CHUNKS)
    earlier = read_sensitivities(unfinished)
    values = dict(earlier.values) if earlier else {}
    saved = [time.monotonic()]

    def save(done: int, total: int) -> None:
        tell(done, total)
        if time.monotonic() - saved[0] >= SAVE_SECONDS:
            write_sensitivities(unfinished, Sensitivities(values, True, "unfinished"))
            saved[0] = time.monotonic()

    encoding = options.encoding if options.encoding.threads else type(options.encoding)("fast", usable_cores(), options.encoding.effort)
    with TemporaryDirectory(prefix="a3b-sensitivity-") as folder, LlamaLog():
        path = _as_it_is(source, options)
        if path is None:
            path = Path(folder) / "model.gguf"
            write_gguf(path, source.model.metadata, [copy_job(tensor) for tensor in source.model.tensors])
        tokens, name = _tokens(path, data, n_chunk)
        tensors = [tensor for tensor in source.model.tensors if tensor.name in wanted]
        try:
            measure(path, tensors, tokens, partial(weighting, source), encoding, save, values)
        except KeyboardInterrupt as error:
            write_sensitivities(unfinished, Sensitivities(values, True, "unfinished"))
            done = f"{len(values)} of {len(tensors)} tensors are measured and kept"
            raise Interrupted("measuring sensitivity was stopped", f"{done}: the same command goes on from there") from error
    unfinished.unlink(missing_ok=True)
    return Sensitivities(values, True, f"measured on the model with {tokens.size:,} tokens of {name}")


def _as_it_is(source: Source, options: Options) -> Path | None:
    """The source's file when it can be run as it stands: a GGUF without edits, of float tensors. None when a copy is needed."""
    first = min(source.files, key=lambda path: path.name)
    if first.suffix != ".gguf" or options.edits != Edits():
        return None
    here = {tensor.name: (tensor.shape, tensor.type) for tensor in open_gguf_model(first).tensors}
    same = here == {tensor.name: (tensor.shape, tensor.type) for tensor in source.model.tensors}
    return first if same and all(kind.is_float for _, kind in here.values()) else None


def _tokens(path: Path, data: Sequence[str], n_chunk: int) -> tuple[NDArray[np.int32], str]:
    """Whole chunks of the calibration text: int32 [n_chunk, N_CTX], and what it is called."""
    file = read_gguf(path)
    with load_model(path, LoadParams(n_ctx=N_CTX), vocab_only=True) as model:
        vocab = Vocab(model)
        bos = vocab.bos if vocab.add_bos else None
        found = chunks(read_sources(data, renderer(file)), lambda text: vocab.tokenize(text, parse_special=True), N_CTX, bos)
    whole = [each for each in found.tokens if len(each) == N_CTX]
    if not whole:
        raise UsageError(f"--sensitivity-data: {found.name} has no {N_CTX} tokens in one piece", "give more text")
    return np.array(whole[:n_chunk], np.int32), found.name


def _key(source: Source, options: Options, data: Sequence[str]) -> str:
    digests = [name if name == BUILTIN else _digest(Path(name)) for name in data]
    weights = source.weights.digest if source.weights else ""
    return fingerprint(source.files, "sensitivity", repr(options.edits), weights, *digests).hex()[:32]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"--sensitivity-data: {path}: {error.strerror}", f"give a text file, a .jsonl, or `{BUILTIN}`") from error
