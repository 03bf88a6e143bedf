"""`--clip`: the ranges of a clip_bounds.bin, checked against the model that is to be served."""

from __future__ import annotations

from pathlib import Path

from a3b_gguf.clip_bounds import check_model_id, read_bounds
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.model_id import model_id
from a3b_gguf.roles import layer_of, recurrent_layers
from a3b_gguf.split import shards
from a3b_server.clip import ClipConfig, Mode, limits_of


def clip_config(model: Path, bounds_file: Path | None, mode: Mode | None) -> ClipConfig | None:
    """None when nothing is asked. Raises UsageError for half of the two flags, BadInput for a file that is damaged or of another model."""
    if bounds_file is None and mode is None:
        return None
    if bounds_file is None or mode is None:
        raise UsageError("--clip-bounds and --clip go together", "like --clip-bounds clip_bounds.bin --clip watch")
    bounds, file = read_bounds(bounds_file), read_gguf(model)
    check_model_id(bounds.header, bounds_file, model_id(file), model)
    limits = limits_of(bounds, mode)
    if not limits:
        raise BadInput(f"{bounds_file} has no ranges", "measure again with `a3b calibrate`")
    names = [tensor.name for part in (file, *shards(file)) for tensor in part.tensors]
    routed = frozenset(layer for name in names if "_exps." in name and (layer := layer_of(name)) is not None)
    return ClipConfig(mode, limits, recurrent_layers(names), routed)
