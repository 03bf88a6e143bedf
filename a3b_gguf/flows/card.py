"""The quality card: what `a3b eval` found, carried in the file's own metadata under a3b.eval.*, and printed as Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from a3b_gguf.errors import AnswerIsNo, UsageError
from a3b_gguf.flows.card_report import report_lines
from a3b_gguf.flows.evaluate import Evaluation
from a3b_gguf.flows.inspect import summarise
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import Progress, write_gguf
from a3b_gguf.metadata import Metadata, array, string, u32
from a3b_gguf.part import written
from a3b_gguf.split import read_parts
from a3b_gguf.tensors import TensorJob, TensorSource, n_rows
from a3b_gguf.units import human_bytes
from a3b_quantize.estimates import Estimate

PREFIX = "a3b.eval."
CHUNK_BYTES = 16 << 20
# key behind PREFIX, row of the card, digits behind the point
NUMBERS = (
    ("perplexity", "perplexity", 4),
    ("base_perplexity", "perplexity of the base", 4),
    ("perplexity_ratio", "perplexity / base", 5),
    ("kl_mean", "KL divergence, mean", 6),
    ("kl_median", "KL divergence, median", 6),
    ("kl_p999", "KL divergence, 99.9 %", 6),
    ("kl_max", "KL divergence, maximum", 6),
    ("same_top_percent", "same top-1, %", 3),
    ("p_change_mean", "change of probability, mean, points", 3),
    ("p_change_rms", "change of probability, RMS, points", 3),
)


def refuse_embed(model: Path, output: Path) -> None:
    """Raises UsageError for an `output` that cannot be written, before an hour of work instead of after it."""
    if not written(output, "--embed:").parent.is_dir():
        raise UsageError(f"--embed: the folder of {output} does not exist", "name a .gguf file in one that does")
    if not os.access(output.resolve().parent, os.W_OK | os.X_OK):
        raise UsageError(f"--embed: no right to write into {output.parent}", "choose a place that can be written")
    parts = read_parts(model)
    if len(parts) > 1 and output.exists() and any(output.samefile(part.path) for part in parts):
        raise UsageError(f"--embed: {output} is a part of the model", "name another file: it will hold the whole model")


def embed_evaluation(model: Path, output: Path, found: Evaluation, report: Metadata, progress: Progress | None = None) -> None:
    """Writes `model`, all parts of it, as one file with the results in its metadata. report: what `report_metadata` made of quantize's
    report, or nothing; one that the model carries already stays then. `output` may be `model` itself, which it replaces."""
    source = open_gguf_model(model)
    kept = {key: value for key, value in source.metadata.items() if not key.startswith(PREFIX)}
    write_gguf(output, {**kept, **report, **evaluation_metadata(found)}, [copy_job(tensor) for tensor in source.tensors], progress)


def evaluation_metadata(found: Evaluation) -> Metadata:
    """The results as GGUF metadata; each number as [value, low, high] of its 95 % interval."""
    scores, divergence = found.scores, found.scores.divergence
    result: Metadata = {
        PREFIX + "text": string(Path(found.text).name),
        PREFIX + "text_sha256": string(found.text_sha256),
        PREFIX + "n_ctx": u32(scores.n_ctx),
        PREFIX + "n_chunk": u32(scores.n_chunk),
        PREFIX + "n_scored": u32(scores.n_scored),
        PREFIX + "kv_type": string(found.kv_type),
    }
    if found.n_expert_used:
        result[PREFIX + "n_expert_used"] = u32(found.n_expert_used)
    if found.base is not None:
        result[PREFIX + "base"] = string(found.base.name)
    for key, _, _ in NUMBERS:
        estimate: Estimate | None = getattr(scores if key == "perplexity" else divergence, key, None)
        if estimate is not None:
            result[PREFIX + key] = array("f64", [estimate.value, estimate.low, estimate.high])
    return result


def card(path: Path) -> str:
    """The card of a file as Markdown: sizes by role and type, and the evaluation that it carries.

    Raises AnswerIsNo when the file carries none.
    """
    file = read_parts(path)[0]
    if PREFIX + "n_scored" not in file.metadata:
        raise AnswerIsNo(f"{path} carries no evaluation", f"a3b eval {path} --base BASE.gguf --embed {path}")
    summary = summarise(path)
    lines = [
        f"## Quality of {path.name}",
        "",
        f"{summary.n_bytes:,} bytes ({human_bytes(summary.n_bytes)}), {summary.bits:.3f} bits a weight" + _recipe(file),
        "",
        "| role | type | tensors | weights | bits a weight | share of bytes |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.role} | {row.type} | {row.n_tensors} | {row.n_weights:,} | {row.bits:.2f} | {row.n_bytes / summary.data_bytes:.1%} |"
            for row in summary.roles
        ),
        "",
        _how(file),
        "",
        "| measure | value | 95 % interval |",
        "| --- | ---: | --- |",
        *_numbers(file),
        *report_lines(file),
    ]
    return "\n".join(lines)


def _numbers(file: GGUFFile) -> Iterator[str]:
    for key, title, digits in NUMBERS:
        found: Any = file.get(PREFIX + key)
        if found is not None:
            value, low, high = found
            yield f"| {title} | {value:,.{digits}f} | {low:,.{digits}f} to {high:,.{digits}f} |"


def _how(file: GGUFFile) -> str:
    def value(key: str) -> Any:
        return file.get(PREFIX + key)

    base = f" against {value('base')}" if value("base") else ""
    experts = f", {value('n_expert_used')} experts used" if value("n_expert_used") else ""
    return (
        f"Measured with `a3b eval`{base} on {value('text')} (sha256 {value('text_sha256')[:12]}): {value('n_chunk')} chunks of "
        f"{value('n_ctx'):,} tokens, {value('n_scored'):,} scored, KV cache {value('kv_type')}{experts}."
    )


def _recipe(file: GGUFFile) -> str:
    recipe = file.get("a3b.recipe")
    return f", recipe {recipe}" if recipe else ""


def copy_job(tensor: TensorSource) -> TensorJob:
    """Writes a tensor as it is stored."""

    def chunks() -> Iterator[bytes | memoryview]:
        rows = n_rows(tensor.shape)
        step = max(1, CHUNK_BYTES // tensor.type.row_bytes(tensor.shape[-1]))
        for start in range(0, rows, step):
            yield tensor.raw(start, min(start + step, rows))

    return TensorJob(tensor.name, tensor.shape, tensor.type, chunks)
