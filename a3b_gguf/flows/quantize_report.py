"""The report of `a3b quantize --report`: what every tensor lost, and by role."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from a3b_gguf.flows.quantize_plan import Prepared
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import Progress
from a3b_gguf.part import write_file
from a3b_quantize.encode import Encoding
from a3b_quantize.quality import Pair, TensorError, measure_errors


@dataclass(frozen=True, slots=True)
class RoleError:
    """The tensors of one role, type and group size together; the fields are those of TensorError, worst: the tensor that lost most."""

    role: str
    type: str
    group_size: int
    tensors: int
    error: float
    weighted_error: float | None
    coverage: float | None
    group_price: float | None
    worst: str


@dataclass(frozen=True, slots=True)
class Report:
    """path: where it was written as JSON; effort: 0 for ggml's kernels; imatrix: what the file says about it."""

    path: Path
    output: Path
    policy: str
    kernel: str
    effort: int
    imatrix: str | None
    nbytes: int
    error: float
    roles: tuple[RoleError, ...]
    tensors: tuple[TensorError, ...] = field(repr=False)


def write_report(path: Path, prepared: Prepared, encoding: Encoding, progress: Progress | None = None) -> Report:
    """Compares the files that were written with their source and writes `path` as JSON."""
    total = sum(each.nbytes for each in prepared.assignments)
    tell = (lambda done, name: progress(done, total, name)) if progress else None
    tensors = tuple(measure_errors(_pairs(prepared), encoding, tell))
    weights = prepared.source.weights
    report = Report(
        path=path,
        output=prepared.files[0].path,
        policy=prepared.policy.name,
        kernel=encoding.kernel,
        effort=encoding.effort if encoding.kernel == "fast" else 0,
        imatrix=str(weights.metadata["quantize.imatrix.file"].value) if weights else None,
        nbytes=sum(file.n_bytes for file in prepared.files),
        error=_mean(tensors, "error", "energy") or 0.0,
        roles=by_role(tensors),
        tensors=tensors,
    )
    text = json.dumps(dataclasses.asdict(report), default=str, indent=1).encode()
    write_file(path, text)
    return report


def by_role(tensors: Sequence[TensorError]) -> tuple[RoleError, ...]:
    """Errors by role, type and group size, the role with most bytes first."""
    groups: dict[tuple[str, str, int], list[TensorError]] = {}
    for each in tensors:
        groups.setdefault((each.role, each.type, each.group_size), []).append(each)
    ordered = sorted(groups.items(), key=lambda item: -sum(each.nbytes for each in item[1]))
    return tuple(
        RoleError(
            *key,
            tensors=len(group),
            error=_mean(group, "error", "energy") or 0.0,
            weighted_error=_mean(group, "weighted_error", "weighted_energy"),
            coverage=_mean(group, "coverage", "n_weights"),
            group_price=_mean(group, "group_price", "energy"),
            worst=max(group, key=lambda each: each.error).name,
        )
        for key, group in ordered
    )


def _mean(tensors: Sequence[TensorError], value: str, weight: str) -> float | None:
    """Mean of a field over the tensors that have it, weighted by another; None when none has it."""
    found = [(getattr(each, value), getattr(each, weight)) for each in tensors if getattr(each, value) is not None]
    total = sum(share for _, share in found)
    return sum(number * share for number, share in found) / total if total else None if not found else 0.0


def _pairs(prepared: Prepared) -> list[Pair]:
    written = {tensor.name: tensor for tensor in open_gguf_model(prepared.files[0].path).tensors}
    weights = prepared.source.weights
    entries = weights.imatrix.entries if weights else {}
    return [
        Pair(tensor, written[tensor.name], each, prepared.source.importance.get(tensor.name), entries.get(tensor.name))
        for tensor, each in zip(prepared.source.model.tensors, prepared.assignments, strict=True)
    ]
