"""Opens a checkpoint folder as a Model: metadata and tensors in GGUF's terms, nothing read yet but headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Literal

from a3b_convert.archs import find
from a3b_convert.archs.base import Arch, apply, count_mtp_blocks, rename
from a3b_convert.chat_template import template_metadata
from a3b_convert.checkpoint import Checkpoint, read_checkpoint
from a3b_convert.config import Config, read_config
from a3b_convert.draft import draft_only
from a3b_convert.general import general_metadata
from a3b_convert.norms import as_stored
from a3b_convert.placed import PlacedTensor
from a3b_convert.prequantized import refuse_adapter, scheme_of
from a3b_convert.scaled import with_scales
from a3b_convert.template_lint import lint_template
from a3b_convert.tokenizer import tokenizer_metadata
from a3b_gguf.catalog import absent
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Metadata, u32
from a3b_gguf.tensors import TYPES, Model

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}  # general.file_type. Source: enum llama_ftype in llama.h
Mtp = bool | Literal["only"]  # keep the MTP block, leave it out, or write it alone as a draft model
QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION in ggml.h


def open_checkpoint(folder: Path, *, mtp: bool = True, chat_template: Path | None = None) -> Model:
    """The model in `folder`, its tensors in the types that lose nothing: what `convert` writes with --type auto.

    mtp: keep the multi-token-prediction block. chat_template: a file that replaces the checkpoint's own template.
    Raises BadInput that says which file, tensor or key is wrong and what was expected.
    """
    metadata, tensors, notes = read_model(folder, mtp, chat_template)
    return Model(metadata, tuple(tensors), tuple(notes))


def read_model(
    folder: Path, mtp: Mtp, chat_template: Path | None, float_type: str = "auto"
) -> tuple[Metadata, list[PlacedTensor], list[str]]:
    """Metadata, tensors in the order of the file, and notes.

    float_type: what the tensors will become; products of FP8 weights and scales are read as bf16 for "auto" and "bf16", else as f32.
    """
    if not folder.exists():
        raise absent(folder, "give a checkpoint folder with config.json and safetensors")
    if not folder.is_dir():
        raise BadInput(f"{folder} is a file", "give the checkpoint's folder, with config.json and safetensors")
    refuse_adapter(folder)
    config = read_config(folder)
    arch = find(config)
    checkpoint = read_checkpoint(folder, bool(mtp))
    sources, scale_notes = checkpoint.tensors, list[str]()
    scheme = scheme_of(config, sources)
    if scheme:
        kind = TYPES["bf16" if float_type in ("auto", "bf16") else "f32"]
        sources, scale_notes = with_scales(folder, sources, scheme, kind)
    tensors = rename(arch, sources)
    n_mtp = count_mtp_blocks(tensors)
    dims = arch.dims(config)
    table, norm_notes = as_stored(folder, arch.rows(config, dims, n_mtp), dims, tensors)
    if mtp == "only":
        table, tensors, draft_notes = draft_only(folder, table, tensors, n_mtp)
        norm_notes += draft_notes
    placed, ignored = apply(arch, table, dims, folder, tensors)
    template, notes = template_metadata(folder, chat_template)
    general, card_notes = general_metadata(config, arch.gguf_name, placed)
    metadata = {
        **general,
        **arch.metadata(config, n_mtp, FILE_TYPES[main_type(placed)]),
        "general.quantization_version": u32(QUANTIZATION_VERSION),
        **tokenizer_metadata(config, dims["vocab"]),
        **template,
    }
    _refuse_half_characters(folder, metadata)
    notes += lint_template(metadata)
    notes += [f"left out: {len(names)} tensors ({what})" for what, names in ignored.items()]
    return metadata, placed, [*_mtp_notes(config, arch, checkpoint, n_mtp, bool(mtp)), *scale_notes, *norm_notes, *notes, *card_notes]


def main_type(tensors: Sequence[PlacedTensor]) -> str:
    """The type that most weights have, tensors apart that are F32 in every file."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if not tensor.always_f32:
            weights[tensor.type.name] += prod(tensor.shape)
    return weights.most_common(1)[0][0]


def _refuse_half_characters(folder: Path, metadata: Metadata) -> None:
    """JSON can name half of a character ("\\ud800"); a file cannot hold it."""
    for key, field in metadata.items():
        try:
            "".join([field.value] if field.kind == "str" else field.value if field.item == "str" else []).encode()
        except UnicodeEncodeError as error:
            raise BadInput(
                f"{folder}: {key} holds {error.object[error.start]!r}, which is no character", "take the original files"
            ) from error


def _mtp_notes(config: Config, arch: Arch, checkpoint: Checkpoint, n_mtp: int, mtp: bool) -> list[str]:
    """Where config.json and the tensors disagree on MTP. A file that claims a block it lacks does not load in llama.cpp."""
    if n_mtp > 1:
        raise BadInput(f"{checkpoint.folder} has {n_mtp} MTP blocks, {arch.gguf_name} has one", "leave them out with --no-mtp")
    promised = config.may("mtp_num_hidden_layers", int, 0) or 0
    if not mtp:
        return ["left out: the MTP block (--no-mtp)"] if promised or checkpoint.left_out else []
    if promised and not n_mtp:
        return [f"config.json promises {promised} MTP block, but the checkpoint has no mtp.* tensors: the file is written without it"]
    if n_mtp and promised != n_mtp:
        said = "nothing of it" if config.may("mtp_num_hidden_layers", int) is None else str(promised)
        return [f"the checkpoint has {n_mtp} MTP block, config.json says {said}: the tensors were believed"]
    return []
