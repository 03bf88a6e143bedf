"""`a3b calibrate` from end to end: read the text, check the memory, run the model over it, write three files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from a3b_gguf.clip_bounds import FILE_NAME as BOUNDS_NAME
from a3b_gguf.errors import BadInput, Interrupted, MachineLacks, UsageError
from a3b_gguf.fingerprint import fingerprint
from a3b_gguf.flows.calibration_folder import IMATRIX_NAME, WINSORIZED_NAME, output_folder
from a3b_gguf.flows.prompts import chat_template_of
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.llama.load import LoadedModel, load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.split import read_parts
from a3b_gguf.units import human_bytes
from a3b_quantize.bounds import write_bounds
from a3b_quantize.calibrate import Collected, Progress, Settings, calibrate
from a3b_quantize.calibration_data import Chunks, Render, chunks, read_sources
from a3b_quantize.calibration_memory import needed_bytes
from a3b_quantize.calibration_state import FILE_NAME as STATE_NAME
from a3b_quantize.coverage import LayerCoverage
from a3b_quantize.encode import check_threads
from a3b_quantize.histograms_file import FILE_NAME as HISTOGRAMS_NAME
from a3b_quantize.histograms_file import write_histograms
from a3b_quantize.imatrix import Imatrix, write_imatrix
from a3b_quantize.inputs import entries
from a3b_quantize.measure import header_for
from a3b_quantize.sites import records

# Architectures whose MTP block llama.cpp runs, when there is exactly one. Source: graph_mtp in src/models/*.cpp
MTP_ARCHITECTURES = ("qwen35moe", "qwen35", "qwen3next")
LEAST_CTX, MOST_CTX = 32, 1 << 20
BYTES_PER_THREAD = 256 << 20  # the graph stops at every measured node: more threads than work only wait for each other


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. data: files or `builtin`; most_chunks: all when None; threads: by cores and size when None.

    output_tensor: collect for the output matrix too; winsorize: write a second matrix of capped squares; enough, save_seconds: see
    a3b_quantize.calibrate.Settings.
    """

    data: tuple[str, ...] = ()
    n_ctx: int = 512
    most_chunks: int | None = None
    output_tensor: bool = False
    winsorize: bool = False
    enough: int = 256
    threads: int | None = None
    save_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was written. winsorized: the matrix of capped squares, or None; chunks_given: how many the text had.

    covered: by layer of a model with routed experts; resumed: chunks that an earlier run had done.
    """

    folder: Path
    imatrix: Path
    winsorized: Path | None
    bounds: Path
    histograms: Path
    entries: int
    data: str
    tokens: int
    chunks: int
    chunks_given: int
    stopped_early: bool
    resumed: int
    covered: tuple[LayerCoverage, ...]
    notes: tuple[str, ...]


def default_folder(model: Path) -> Path:
    """`<stem>-calibration` in the current folder."""
    return Path(f"{model.name.removesuffix('.gguf')}-calibration")


def calibrate_file(
    path: Path,
    folder: Path | None,
    options: Options,
    progress: Progress | None = None,
    free_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
) -> Calibrated:
    """Runs the GGUF at `path` over the text and writes imatrix.gguf, clip_bounds.bin and histograms.npz into `folder`.

    What an interrupted run with the same model, text and options left there is continued. Raises UsageError, BadInput or MachineLacks,
    and then nothing new stands under the three names.
    """
    _check(options)
    parts = read_parts(path)
    file, shapes = parts[0], {info.name: info.shape for part in parts for info in part.tensors}
    _check_memory(parts, options, free_bytes())
    sources = read_sources(options.data, renderer(file))
    mtp = has_mtp(file, shapes)
    params = LoadParams(n_ctx=options.n_ctx, load_mtp=mtp)
    names = (IMATRIX_NAME, *((WINSORIZED_NAME,) if options.winsorize else ()), HISTOGRAMS_NAME, BOUNDS_NAME, STATE_NAME)
    with LlamaLog(), output_folder(folder or default_folder(path), names) as out, load_model(path, params) as model:
        data = _chunks(model, sources, options)
        settings = _settings(options, parts, mtp)
        kept = out / STATE_NAME, _key(parts, data, settings)
        try:
            collected = calibrate(model, shapes, data.tokens, settings, kept, progress)
        except KeyboardInterrupt as error:
            hint = "run the same command again: it goes on from the last save" if kept[0].exists() else "nothing was saved yet"
            raise Interrupted(f"calibration of {path} was stopped", hint) from error
    found = _write(out, file, data, collected, options)
    kept[0].unlink(missing_ok=True)
    return found


def has_mtp(file: GGUFFile, names: Iterable[str]) -> bool:
    """Whether the file has an MTP block that llama.cpp can run: told from the tensors, since metadata is often wrong about it."""
    n_layer = int(file.hparam("block_count", 0)) - 1
    one = int(file.hparam("nextn_predict_layers", 0)) == 1
    return one and file.architecture in MTP_ARCHITECTURES and any(name.startswith(f"blk.{n_layer}.nextn.eh_proj") for name in names)


def _check(options: Options) -> None:
    if not LEAST_CTX <= options.n_ctx <= MOST_CTX:
        raise UsageError(f"--ctx: {options.n_ctx} tokens", f"it must be {LEAST_CTX} to {MOST_CTX:,}")
    check_threads(options.threads)
    for flag, value, least in (("--chunks", options.most_chunks, 1), ("--enough", options.enough, 0)):
        if value is not None and value < least:
            raise UsageError(f"{flag}: {value} is too small", f"it must be at least {least}")


def _check_memory(parts: Sequence[GGUFFile], options: Options, free: int) -> None:
    needed = needed_bytes(parts, options.n_ctx, options.winsorize)
    if needed > free:
        raise MachineLacks(
            f"{parts[0].path}: calibration needs {human_bytes(needed)} of memory, {human_bytes(free)} are free",
            "calibrate a smaller quantization of the same model (`a3b quantize --type iq4_nl`): its importance serves every type",
        )


def renderer(file: GGUFFile) -> Render:
    """The file's own chat template; where it has none, one paragraph for each message."""
    try:
        template = chat_template_of(file)
    except BadInput:
        return _plain
    return lambda messages, tools: template.render(messages, tools, add_generation_prompt=False)


def _plain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    return "".join(f"{each.get('content') or each.get('tool_calls')}\n\n" for each in messages)


def _chunks(model: LoadedModel, sources: Any, options: Options) -> Chunks:
    if options.n_ctx > model.n_ctx_train > 0:
        raise UsageError(f"--ctx: {options.n_ctx:,} tokens are more than the {model.n_ctx_train:,} that the model was trained for")
    vocab = Vocab(model)
    data = chunks(sources, lambda text: vocab.tokenize(text, parse_special=True), options.n_ctx, vocab.bos if vocab.add_bos else None)
    return data if options.most_chunks is None else replace(data, tokens=data.tokens[: options.most_chunks])


def _threads(options: Options, parts: Sequence[GGUFFile]) -> int:
    size = sum(part.file_size for part in parts)
    return options.threads or max(1, min(psutil.cpu_count(logical=False) or 1, size // BYTES_PER_THREAD))


def _settings(options: Options, parts: Sequence[GGUFFile], mtp: bool) -> Settings:
    return Settings(
        n_ctx=options.n_ctx,
        n_threads=_threads(options, parts),
        output=options.output_tensor,
        winsorize=options.winsorize,
        mtp=mtp,
        enough=options.enough,
        save_seconds=options.save_seconds,
    )


def _key(parts: Sequence[GGUFFile], data: Chunks, settings: Settings) -> bytes:
    """What a state must be of to be continued. Threads do not matter."""
    tokens = hashlib.sha256(repr(data.tokens).encode()).hexdigest()
    return fingerprint([part.path for part in parts], "calibrate", tokens, repr(replace(settings, n_threads=1, save_seconds=0)))


def _write(out: Path, file: GGUFFile, data: Chunks, collected: Collected, options: Options) -> Calibrated:
    state = collected.state
    header = header_for(file, collected.n_tokens, data.name, data.sha256)
    imatrix = Imatrix(entries(state.groups, state.group_of), options.n_ctx, collected.n_chunks, (data.name,))
    write_imatrix(out / IMATRIX_NAME, imatrix)
    if options.winsorize:
        write_imatrix(out / WINSORIZED_NAME, replace(imatrix, entries=entries(state.groups, state.group_of, capped=True)))
    write_histograms(out / HISTOGRAMS_NAME, header, state.ranges)
    write_bounds(out / BOUNDS_NAME, header, records(state.ranges))
    return Calibrated(
        folder=out,
        imatrix=out / IMATRIX_NAME,
        winsorized=out / WINSORIZED_NAME if options.winsorize else None,
        bounds=out / BOUNDS_NAME,
        histograms=out / HISTOGRAMS_NAME,
        entries=len(imatrix.entries),
        data=data.name,
        tokens=collected.n_tokens,
        chunks=collected.n_chunks,
        chunks_given=len(data.tokens),
        stopped_early=collected.stopped_early,
        resumed=collected.resumed,
        covered=collected.covered,
        notes=data.notes,
    )
