"""Metadata of a quantized file: that of its source, with what changed replaced in its place."""

from __future__ import annotations

from a3b_gguf.metadata import Field, Metadata, string, u32
from a3b_quantize.policy import Policy

FILE_TYPE = "general.file_type"
QUANTIZATION_VERSION = "general.quantization_version"
RECIPE = "a3b.recipe"
QNT_VERSION = 2  # GGML_QNT_VERSION in ggml.h


def quantized_metadata(source: Metadata, policy: Policy) -> Metadata:
    """`source` with the file type, the version of the block formats and the recipe's name; the order of keys stays."""
    changed: dict[str, Field] = {FILE_TYPE: u32(policy.file_type), QUANTIZATION_VERSION: u32(QNT_VERSION), RECIPE: string(policy.name)}
    return {**source, **changed}
