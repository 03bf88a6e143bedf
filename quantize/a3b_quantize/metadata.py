"""Metadata of a quantized file: that of its source, with what changed replaced in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from a3b_gguf.metadata import Field, Metadata, array, string, u32
from a3b_quantize.assign import Assignment
from a3b_quantize.imatrix import Imatrix
from a3b_quantize.policy import Policy

FILE_TYPE = "general.file_type"
QUANTIZATION_VERSION = "general.quantization_version"
RECIPE, OVERRIDES = "a3b.recipe", "a3b.overrides"
QNT_VERSION = 2  # GGML_QNT_VERSION in ggml.h
PREFIX = "quantize.imatrix."
LONGEST = 127  # bytes of a text that llama-quantize keeps


def quantized_metadata(source: Metadata, policy: Policy, assignments: Sequence[Assignment]) -> Metadata:
    """`source` with the file type, the version of the block formats and the recipe's name; the order of keys stays.

    A copy keeps what its source says, but for the flags that changed single tensors.
    """
    changed: dict[str, Field] = {}
    if not policy.copies:
        changed = {
            FILE_TYPE: u32(policy.number(assignments)),
            QUANTIZATION_VERSION: u32(QNT_VERSION),
            RECIPE: string(policy.name),
        }
    if policy.overrides:
        changed[OVERRIDES] = array("str", policy.overrides)
    stale = () if policy.copies else (OVERRIDES, PREFIX)  # of the run that made the source
    kept = {key: value for key, value in source.items() if not key.startswith(stale)}
    return {**kept, **changed}


def imatrix_metadata(path: Path, imatrix: Imatrix) -> Metadata:
    """What llama-quantize notes about the importance matrix. Source: main of tools/quantize/quantize.cpp"""
    found = {f"{PREFIX}file": string(_cut(str(path)))}
    if imatrix.datasets:
        found[f"{PREFIX}dataset"] = string(_cut(imatrix.datasets[0]))
    found[f"{PREFIX}entries_count"] = u32(len(imatrix.entries))
    if imatrix.chunk_count > 0:
        found[f"{PREFIX}chunks_count"] = u32(imatrix.chunk_count)
    return found


def _cut(text: str) -> str:
    return text.encode()[:LONGEST].decode(errors="ignore")
