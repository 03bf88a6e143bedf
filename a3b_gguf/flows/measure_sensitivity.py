"""Sensitivities for an allocation: measured on the model itself when it is small enough, kept for the next budget, else from the table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, MachineLacks
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.flows.calibrate import renderer
from a3b_gguf.flows.card import copy_job
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.flows.quantize_plan import Source
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.units import GIB, MIB, human_bytes
from a3b_gguf.user_cache import cache_folder
from a3b_quantize.assign import Assignment
from a3b_quantize.calibration_data import chunks, read_sources
from a3b_quantize.encode import usable_cores
from a3b_quantize.rule import subjects_of
from a3b_quantize.sensitivity import Sensitivities, from_table, measure, read_sensitivities, write_sensitivities

AUTO_BYTES = 2 * GIB  # weights of a model that is measured unasked: about a minute for each 100 MiB and core
MARGIN = 1 * GIB
N_CTX = 512
CHUNKS = ((256 * MIB, 12), (2 * GIB, 4))  # up to so many bytes of weights, so many chunks are predicted for each tensor
LEAST_CHUNKS = 2


def sensitivities(
    source: Source,
    groups: Sequence[Sequence[Assignment]],
    options: Options,
    wish: str,
    data: Sequence[str],
    tell: Callable[[int, int], None],
) -> Sensitivities:
    """Of every tensor of `groups`. wish: auto, measure or table; data: texts to predict, the built-in calibration text when empty.

    Raises MachineLacks when `measure` is asked for and the model does not fit into memory.
    """
    n_bytes = sum(tensor.type.nbytes(tensor.shape) for tensor in source.model.tensors)
    names = [each.name for group in groups for each in group]
    needs, free = n_bytes + MARGIN, int(psutil.virtual_memory().available)
    if wish == "measure" and needs > free:
        raise MachineLacks(
            f"measuring sensitivity needs {human_bytes(needs)} of memory, {human_bytes(free)} are free", "leave --sensitivity measure out"
        )
    if wish == "table" or (wish == "auto" and (n_bytes > AUTO_BYTES or needs > free)):
        return from_table(names, subjects_of(source.model).n_layer)
    kept = cache_folder() / "sensitivity" / f"{_key(source, options, data)}.json"
    found = read_sensitivities(kept)
    if found is None:
        try:
            found = _measured(source, names, options, data, n_bytes, tell)
        except BadInput as error:
            if wish == "measure":
                raise
            table = from_table(names, subjects_of(source.model).n_layer)
            return replace(table, how=f"{table.how}, since the model cannot be run: {error.message}")
        write_sensitivities(kept, found)
    return found


def weighting(source: Source, name: str) -> tuple[NDArray[np.float32] | None, NDArray[np.float64] | None]:
    """Importance [n_mat, cols] of a tensor, and how often each of its matrices is used [n_mat]; None where nothing is known."""
    entry = source.weights.imatrix.entries.get(name) if source.weights else None
    usage = None if entry is None or not entry.counts.sum() else (entry.counts / entry.counts.sum()).astype(np.float64)
    return source.importance.get(name), usage


def _measured(
    source: Source, names: Sequence[str], options: Options, data: Sequence[str], n_bytes: int, tell: Callable[[int, int], None]
) -> Sensitivities:
    wanted = set(names)
    encoding = options.encoding if options.encoding.threads else type(options.encoding)("fast", usable_cores(), options.encoding.effort)
    with TemporaryDirectory(prefix="a3b-sensitivity-") as folder, LlamaLog():
        path = Path(folder) / "model.gguf"
        write_gguf(path, source.model.metadata, [copy_job(tensor) for tensor in source.model.tensors])
        tokens, name = _tokens(path, data, next((count for size, count in CHUNKS if n_bytes <= size), LEAST_CHUNKS))
        tensors = [tensor for tensor in source.model.tensors if tensor.name in wanted]
        values = measure(path, tensors, tokens, partial(weighting, source), encoding, tell)
    return Sensitivities(values, True, f"measured on the model with {tokens.size:,} tokens of {name}")


def _tokens(path: Path, data: Sequence[str], n_chunk: int) -> tuple[NDArray[np.int32], str]:
    """Whole chunks of the calibration text: int32 [n_chunk, N_CTX], and what it is called."""
    file = read_gguf(path)
    with load_model(path, LoadParams(n_ctx=N_CTX), vocab_only=True) as model:
        vocab = Vocab(model)
        bos = vocab.bos if vocab.add_bos else None
        found = chunks(read_sources(data, renderer(file)), lambda text: vocab.tokenize(text, parse_special=True), N_CTX, bos)
    whole = [each for each in found.tokens if len(each) == N_CTX]
    return np.array(whole[:n_chunk], np.int32).reshape(-1, N_CTX), found.name


def _key(source: Source, options: Options, data: Sequence[str]) -> str:
    digests = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in data if Path(name).is_file()]
    weights = source.weights.digest if source.weights else ""
    return fingerprint(source.files, "sensitivity", repr(options.edits), weights, *digests).hex()[:32]
