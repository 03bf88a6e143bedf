"""`a3b eval` from end to end: read the text, run the base once and keep what it said, run the model, compare."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.flows.calibrate import renderer
from a3b_gguf.gguf_file import GGUFFile, read_array
from a3b_gguf.llama.devices import gpus
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import KV_TYPES, LoadParams
from a3b_gguf.split import read_parts
from a3b_gguf.units import GIB, human_bytes
from a3b_gguf.user_cache import cache_folder
from a3b_quantize.base_logits import Key, check
from a3b_quantize.calibration_data import LINES, read_sources
from a3b_quantize.encode import check_threads, usable_cores
from a3b_quantize.evaluate import Scores, Text, chunked, compare_file, score, scores_of, tokens_sha256, write_base

BUILT_IN = "evaluation.txt"
CACHE_BYTES = 8 * GIB
CACHE_SUFFIX = ".a3bbase"
TOKENS = "tokenizer.ggml.tokens"
MOST_LAYERS = 512  # llama.cpp takes no model with more. Source: LLAMA_MAX_LAYERS in src/llama-hparams.h

# What a step of the work is called -> a context manager that yields tell(chunks done, chunks in all)
Shown = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the user asked for. data: None is the built-in text; n_chunk: None is the whole text; n_expert_used: 0 is the file's own.

    kv_type: one type, or two as K/V. n_gpu_layers: layers on the GPUs, None all where there is one. cache: folder for what bases said;
    None keeps nothing. cache_bytes: what the folder may hold.
    """

    base: Path | None = None
    data: Path | None = None
    parse_special: bool = False
    n_ctx: int = 512
    n_chunk: int | None = None
    kv_type: str = "f16"
    n_expert_used: int = 0
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    threads: int | None = None
    cache: Path | None = None
    cache_bytes: int = CACHE_BYTES


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, on what, and how. n_bytes: of the model's files; seconds: of running the model, without the base."""

    model: Path
    n_bytes: int
    base: Path | None
    text: str
    text_sha256: str
    kv_type: str
    n_expert_used: int
    scores: Scores
    seconds: float
    tokens_per_second: float
    base_file: Path | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """What stays the same from the first step to the result."""

    path: Path
    n_bytes: int
    text: Text
    options: EvalOptions

    def result(self, scores: Scores, seconds: float, file: Path | None = None, notes: tuple[str, ...] = ()) -> Evaluation:
        return Evaluation(
            model=self.path,
            n_bytes=self.n_bytes,
            base=self.options.base,
            text=self.text.name,
            text_sha256=hashlib.sha256(self.text.text.encode()).hexdigest(),
            kv_type="/".join(kv_types(self.options.kv_type)),
            n_expert_used=self.options.n_expert_used,
            scores=scores,
            seconds=seconds,
            tokens_per_second=scores.n_chunk * scores.n_ctx / seconds if seconds else 0.0,
            base_file=file,
            notes=notes,
        )


def default_cache() -> Path:
    """Where distributions of bases are kept when nobody says otherwise."""
    return cache_folder() / "eval"


def evaluate_file(path: Path, options: EvalOptions, shown: Shown) -> Evaluation:
    """Perplexity of the model at `path`, and with a base its divergence from that.

    Raises BadInput for a file that is no model or a base with another vocabulary, UsageError for a text or context that does not do,
    MachineLacks when memory or disk are short.
    """
    parts = read_parts(path)
    if options.cache is not None and options.cache.exists() and not options.cache.is_dir():
        raise UsageError(f"--cache: {options.cache} is a file, not a folder", "name a folder; it is made when it does not exist")
    run = _Run(path, sum(part.file_size for part in parts), read_text(options, parts[0]), options)
    kv_k, kv_v = kv_types(options.kv_type)
    if options.base is not None:
        refuse_other_vocabulary(path, options.base)
    with LlamaLog():
        params = replace(load_params(options), kv_type_k=kv_k, kv_type_v=kv_v, n_expert_used=options.n_expert_used)
        if options.base is None:
            return _alone(run, params, shown)
        if options.cache is not None:
            return _against(run, options.base, params, options.cache, shown)
        with TemporaryDirectory(prefix="a3b-eval-") as folder:
            found = _against(run, options.base, params, Path(folder), shown)
        return replace(found, base_file=None)


def read_text(options: EvalOptions, file: GGUFFile) -> Text:
    """The text to evaluate on. One line break at its very end does not count, as in llama.cpp's tools.

    A .jsonl holds texts and conversations as for `a3b calibrate`: the chat template of `file` renders them, control tokens are tokens.
    """
    if options.data is None:
        text = (files("a3b_quantize") / "texts" / BUILT_IN).read_text(encoding="utf-8")
        return Text("the built-in text", text.removesuffix("\n"))
    if options.data.suffix in LINES:
        documents = [text for source in read_sources([str(options.data)], renderer(file)) for text in source.documents]
        return Text(str(options.data), "\n".join(documents), parse_special=True)
    try:
        text = options.data.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{options.data}: byte {error.start} is not UTF-8", "give a plain text file") from error
    except OSError as error:
        raise BadInput(f"{options.data}: {error.strerror}", "check the path given with --data") from error
    if not text.strip():
        raise BadInput(f"{options.data} holds no text", "give a text of at least --ctx tokens with --data")
    return Text(str(options.data), text.removesuffix("\n"), options.parse_special)


def kv_types(wish: str) -> tuple[str, str]:
    """K and V of "q8_0" or "q8_0/q4_0". Raises UsageError that lists the types."""
    k, slash, v = wish.lower().partition("/")
    pair = k, v if slash else k
    for kind in pair:
        if kind not in KV_TYPES:
            raise UsageError(f"--kv-type: there is no KV cache type {kind!r}", f"known: {', '.join(KV_TYPES)}, or two as K/V")
    return pair


def load_params(options: EvalOptions) -> LoadParams:
    """How models are loaded: on the GPUs where there are any and --n-gpu-layers does not say otherwise."""
    check_threads(options.threads)
    if options.n_gpu_layers is not None and options.n_gpu_layers < 0:
        raise UsageError(f"--n-gpu-layers: {options.n_gpu_layers} cannot be", "0 leaves all in RAM; for all on the GPUs leave it out")
    threads = options.threads or usable_cores()
    layers = min(MOST_LAYERS, options.n_gpu_layers) if options.n_gpu_layers is not None else MOST_LAYERS if gpus() else 0
    moved = tuple(range(min(MOST_LAYERS, options.n_cpu_moe)))
    return LoadParams(n_ctx=options.n_ctx, n_gpu_layers=layers, cpu_expert_layers=moved, n_threads=threads, n_threads_batch=threads)


def refuse_other_vocabulary(model: Path, base: Path) -> None:
    """Raises BadInput when the two files do not have the same tokens: their distributions cannot be compared."""
    ours, theirs = (read_array(read_parts(path)[0], TOKENS) for path in (model, base))
    if len(ours) != len(theirs):
        raise BadInput(f"{base} has {len(theirs):,} tokens, {model} has {len(ours):,}: they are not of one model", "give another --base")
    other = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if other is not None:
        raise BadInput(
            f"token {other} is {theirs[other]!r} in {base} and {ours[other]!r} in {model}: they are not of one model", "give another --base"
        )


def _alone(run: _Run, params: LoadParams, shown: Shown) -> Evaluation:
    with load_model(run.path, params) as model:
        chunks = chunked(model, run.text, run.options.n_ctx, run.options.n_chunk)
        started = monotonic()
        with shown("model") as tell:
            scores = score(model, params, chunks, tell)
    return run.result(scores, monotonic() - started)


def _against(run: _Run, base: Path, params: LoadParams, folder: Path, shown: Shown) -> Evaluation:
    chunks, file, key, notes = base_distributions(base, run.text, run.options, folder, shown)
    started = monotonic()
    with shown("model") as tell:
        compared = compare_file(run.path, params, chunks, file, key, tell)
    seconds = monotonic() - started
    notes = (*notes, *trim(folder, run.options.cache_bytes))
    return run.result(scores_of(compared, run.options.n_ctx), seconds, file if file.exists() else None, notes)


def base_distributions(
    base: Path, text: Text, options: EvalOptions, folder: Path, shown: Shown
) -> tuple[NDArray[np.int32], Path, Key, tuple[str, ...]]:
    """The text in chunks, and the file in `folder` with what `base` says to them: an earlier one where it fits, else made now.

    The base runs with an f16 KV cache and with its own number of experts. A file that is damaged is made again, and a note says so.
    """
    params = load_params(options)
    with load_model(base, params, vocab_only=True) as vocabulary:
        chunks = chunked(vocabulary, text, options.n_ctx, options.n_chunk)
        n_vocab = len(read_array(read_parts(base)[0], TOKENS))
    identity = fingerprint([part.path for part in read_parts(base)], "eval").hex()
    key = Key(identity, tokens_sha256(chunks), options.n_ctx, len(chunks), n_vocab, 0)
    file = folder / f"{base.stem[:60]}-{key.base[:8]}-{key.tokens[:8]}-{options.n_ctx}{CACHE_SUFFIX}"
    notes: tuple[str, ...] = ()
    if file.exists():
        try:
            check(file, key)
        except BadInput as error:
            notes = (f"{error.message}; the base was run again",)
        else:
            os.utime(file)
            return chunks, file, key, (f"the base was not run: {file} holds what it said",)
    with load_model(base, params) as model, shown("base") as tell:
        write_base(file, key, model, params, chunks, tell)
    return chunks, file, key, notes


def trim(folder: Path, limit: int) -> tuple[str, ...]:
    """Deletes files that were used least recently until the folder holds at most `limit` bytes; notes what went."""
    standing = sorted(folder.glob(f"*{CACHE_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in standing)
    notes = []
    for path in standing:
        if total <= limit:
            break
        size = path.stat().st_size
        path.unlink()
        total -= size
        notes.append(f"{path} ({human_bytes(size)}) was deleted: the folder may hold {human_bytes(limit)}")
    return tuple(notes)
