"""Perplexity of a model, and how far it is from its base: the numbers of llama-perplexity, from the same chunks of the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.errors import UsageError
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama.load import LoadedModel, load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.scoring import Block, scored_blocks
from a3b_gguf.llama.vocab import Vocab
from a3b_quantize.base_logits import Key, Writer, read
from a3b_quantize.divergence import BaseRows, Compared, base_rows, compare, in_threads, joined, negative_log_p
from a3b_quantize.estimates import Estimate, exp_mean, maximum, mean, quantile, root_mean_square

LEAST_CTX = 16

# (chunks done, chunks in all)
Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Text:
    """What is read: its name for people, its characters, and whether control tokens in it are tokens or letters."""

    name: str
    text: str
    parse_special: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """A model against its base. kl: nats a token; p_change: percentage points of the probability of the token that followed."""

    base_perplexity: Estimate
    perplexity_ratio: Estimate
    log_ratio: Estimate
    kl_mean: Estimate
    kl_median: Estimate
    kl_p99: Estimate
    kl_p999: Estimate
    kl_max: Estimate
    same_top_percent: Estimate
    p_change_mean: Estimate
    p_change_rms: Estimate


@dataclass(frozen=True, slots=True)
class Scores:
    """What was measured over n_chunk chunks of n_ctx tokens, n_scored positions in all."""

    n_ctx: int
    n_chunk: int
    n_scored: int
    perplexity: Estimate
    divergence: Divergence | None


def chunked(model: LoadedModel, text: Text, n_ctx: int, n_chunk: int | None) -> NDArray[np.int32]:
    """The text's first `n_chunk` chunks (all that are whole when None) as tokens, int32 [n_chunk, n_ctx].

    The first token of the text is BOS where the model adds one; a last chunk that is not whole is left out. As llama-perplexity does.
    Raises UsageError for a context that the model was not trained for, or a text that is too short for it.
    """
    if n_ctx < LEAST_CTX:
        raise UsageError(f"--ctx: {n_ctx} tokens are too few", f"it must be at least {LEAST_CTX}")
    trained = int(read_gguf(model.path).hparam("context_length", 0))
    if n_ctx > trained > 0:
        raise UsageError(f"--ctx: {n_ctx:,} tokens are more than the {trained:,} that {model.path} was trained for", "take less context")
    if n_chunk is not None and n_chunk < 1:
        raise UsageError(f"--chunks: {n_chunk} is not a number of chunks", "it must be at least 1")
    vocab = Vocab(model)
    tokens = [vocab.bos] * vocab.add_bos + vocab.tokenize(text.text, text.parse_special)
    whole = len(tokens) // n_ctx
    if not whole or (n_chunk is not None and n_chunk > whole):
        needed = n_ctx * (n_chunk or 1)
        raise UsageError(
            f"{text.name} has {len(tokens):,} tokens, {n_chunk or 1} chunks of {n_ctx:,} need {needed:,}",
            "give a longer text with --data, or take a smaller --ctx or fewer --chunks",
        )
    whole = whole if n_chunk is None else n_chunk
    return np.array(tokens[: whole * n_ctx], np.int32).reshape(whole, n_ctx)


def tokens_sha256(chunks: NDArray[np.int32]) -> str:
    return hashlib.sha256(chunks.astype("<i4").tobytes()).hexdigest()


def write_base(path: Path, key: Key, model: LoadedModel, params: LoadParams, chunks: NDArray[np.int32], tell: Tell) -> None:
    """Runs the base `model` over `chunks` and writes its distributions to `path`."""
    with Writer(path, key) as writer, ThreadPoolExecutor(params.n_threads) as pool:
        for number, blocks in _by_chunk(model, params, chunks):
            parts: list[BaseRows] = []
            for block in blocks:
                parts += _in_parts(pool, params, block, base_rows)
            writer.add(joined(parts))
            tell(number + 1, len(chunks))
        writer.finish()


def score(model: LoadedModel, params: LoadParams, chunks: NDArray[np.int32], tell: Tell) -> Scores:
    """Perplexity alone."""
    rows: list[NDArray[np.float64]] = []
    with ThreadPoolExecutor(params.n_threads) as pool:
        for number, blocks in _by_chunk(model, params, chunks):
            found = [part for block in blocks for part in _in_parts(pool, params, block, negative_log_p)]
            rows.append(np.concatenate(found))
            tell(number + 1, len(chunks))
    nll = np.stack(rows)
    return Scores(chunks.shape[1], len(chunks), nll.size, exp_mean(nll), None)


def compare_model(
    model: LoadedModel, params: LoadParams, chunks: NDArray[np.int32], base: Iterator[BaseRows], tell: Tell
) -> list[Compared]:
    """The model against the base's distributions, chunk by chunk."""
    result = []
    with ThreadPoolExecutor(params.n_threads) as pool:
        for (number, blocks), rows in zip(_by_chunk(model, params, chunks), base, strict=True):
            result.append(joined([part for block in blocks for part in _compare_block(pool, params, block, rows)]))
            tell(number + 1, len(chunks))
    return result


def scores_of(compared: list[Compared], n_ctx: int) -> Scores:
    """The numbers of llama-perplexity --kl-divergence."""
    nll, base_nll, kl, p_change, same = (
        np.stack([getattr(each, name) for each in compared]) for name in ("nll", "base_nll", "kl", "p_change", "same_top")
    )
    divergence = Divergence(
        base_perplexity=exp_mean(base_nll),
        perplexity_ratio=exp_mean(nll - base_nll),
        log_ratio=mean(nll - base_nll),
        kl_mean=mean(kl),
        kl_median=quantile(kl, 0.5),
        kl_p99=quantile(kl, 0.99),
        kl_p999=quantile(kl, 0.999),
        kl_max=maximum(kl),
        same_top_percent=mean(same.astype(np.float64), 100.0),
        p_change_mean=mean(p_change, 100.0),
        p_change_rms=root_mean_square(p_change, 100.0),
    )
    return Scores(n_ctx, len(compared), nll.size, exp_mean(nll), divergence)


def compare_file(path: Path, params: LoadParams, chunks: NDArray[np.int32], base: Path, key: Key, tell: Tell) -> list[Compared]:
    """Loads the model at `path` and compares it with the distributions at `base`."""
    with load_model(path, params) as model:
        return compare_model(model, params, chunks, read(base, key), tell)


def _by_chunk(model: LoadedModel, params: LoadParams, chunks: NDArray[np.int32]) -> Iterator[tuple[int, Iterator[Block]]]:
    yield from groupby(scored_blocks(model, params, chunks), key=lambda block: block.chunk)


def _in_parts(pool: ThreadPoolExecutor, params: LoadParams, block: Block, function: Callable[..., Any]) -> list[Any]:
    def part(start: int, stop: int) -> Any:
        return function(block.logits[start:stop], block.following[start:stop])

    return in_threads(pool, params.n_threads, part, len(block.logits))


def _compare_block(pool: ThreadPoolExecutor, params: LoadParams, block: Block, base: BaseRows) -> list[Compared]:
    def part(start: int, stop: int) -> Compared:
        own = base.part(block.row + start, block.row + stop)
        return compare(block.logits[start:stop], block.following[start:stop], own)

    return in_threads(pool, params.n_threads, part, len(block.logits))
