"""Metadata of a quantized file: that of its source, with what changed replaced in its place."""

from __future__ import annotations

from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Field, Metadata, string, u32
from a3b_quantize.policy import Policy

FILE_TYPE = "general.file_type"
QUANTIZATION_VERSION = "general.quantization_version"
RECIPE = "a3b.recipe"
QNT_VERSION = 2  # GGML_QNT_VERSION in ggml.h


def quantized_metadata(source: Metadata, policy: Policy) -> Metadata:
    """`source` with the file type, the version of the block formats and the recipe's name; the order of keys stays.

    Raises BadInput for one shard of a split model: its tensors are not all there.
    """
    count = source.get("split.count")
    if count is not None and count.value > 1:
        raise BadInput(
            f"the source is shard {source['split.no'].value + 1 if 'split.no' in source else '?'} of {count.value}",
            "give the checkpoint folder, or merge the shards with `llama-gguf-split --merge`",
        )
    changed: dict[str, Field] = {FILE_TYPE: u32(policy.file_type), QUANTIZATION_VERSION: u32(QNT_VERSION), RECIPE: string(policy.name)}
    kept = {key: value for key, value in source.items() if not key.startswith("split.")}
    return {**kept, **changed}
