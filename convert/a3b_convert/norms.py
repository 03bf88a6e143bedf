"""Whether a checkpoint's norms are stored as w, or as 1 + w as MLX stores them: adding 1 twice makes a model that talks nonsense.

mlx-lm adds the 1 and moves the convolutions' last two dimensions in one pass (sanitize in mlx_lm/models/qwen3_5.py), so the shape tells
what happened, and the norms' own size must say the same. Trained norms are near 0 as w: their means are -0.02 in Qwen3.6-27B, 0.03 to
0.25 in Qwen3.5 (ggml-org/llama.cpp issue 23758, ml-explore/mlx-lm pull request 1623). A grafted MTP block may differ from its trunk
(unslothai/unsloth-zoo pull request 1095).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from a3b_convert.archs.base import Dims, Row, Table, plus_one, shape_of
from a3b_convert.safetensors_file import FLOATS, SafeTensor
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import to_float32

BETWEEN = 0.5  # between 0 and 1
UNSURE = 0.15  # this near to it an MTP block, which has few norms and no convolution, is not judged
HINT = "take the checkpoint as its makers published it"


def as_stored(folder: Path, table: Table, dims: Dims, tensors: Mapping[str, SafeTensor]) -> tuple[Table, list[str]]:
    """The table without the additions that were made already, and what the user should know.

    Raises BadInput when the convolutions say one thing and the norms another, and for an MTP block that could be either.
    """
    rows = [row for row in table if isinstance(row, Row)]
    shapes = _conv_shapes(rows, dims, tensors)
    middle, mtp_middle = (_middle(rows, tensors, mtp) for mtp in (False, True))
    if not shapes or middle is None:
        return table, []
    if len(shapes) == 2:
        raise BadInput(f"{folder}: {shapes[False].name} has the original's shape, {shapes[True].name} has MLX's", HINT)
    ((moved, conv),) = shapes.items()
    if moved != (middle > BETWEEN):
        layout, size = ("MLX has it", "w") if moved else ("the original has it", "1 + w")
        raise BadInput(
            f"{folder}: {conv.name} has shape {list(conv.shape)}, as {layout}, but the norms are {middle:.2f} on average, "
            f"as if they were stored as {size}",
            HINT,
        )
    if not moved:
        return table, []
    if mtp_middle is not None and abs(mtp_middle - BETWEEN) < UNSURE:
        raise BadInput(
            f"{folder}: the trunk's norms are stored as 1 + w ({middle:.2f} on average), those of the MTP block are {mtp_middle:.2f}: "
            "that may be w or 1 + w",
            f"{HINT}, or leave the block out with --no-mtp",
        )
    mtp_added = mtp_middle is not None and mtp_middle > BETWEEN
    kept: Table = [_without_addition(row, mtp_added) if isinstance(row, Row) else row for row in table]
    note = f"the norms are stored as 1 + w, as MLX does ({middle:.2f} on average): nothing was added"
    if mtp_middle is not None and not mtp_added:
        note += f"; those of the MTP block are not ({mtp_middle:.2f}), 1 was added to them"
    return kept, [note]


def _conv_shapes(rows: list[Row], dims: Dims, tensors: Mapping[str, SafeTensor]) -> dict[bool, SafeTensor]:
    """A convolution with MLX's shape (True) and one with the original's (False), as far as there are any."""
    found = [(row, tensors[row.source]) for row in rows if row.also and row.source in tensors]
    return {tensor.shape == shape_of(row.also, dims) != shape_of(row.shape, dims): tensor for row, tensor in found}


def _middle(rows: list[Row], tensors: Mapping[str, SafeTensor], mtp: bool) -> float | None:
    """The median of the means of the norms that 1 is added to, of the trunk or of the MTP block; None when there are none."""
    added = [row.source for row in rows if row.value is plus_one and row.source.startswith("mtp.") == mtp]
    norms = [tensors[name] for name in added if name in tensors]
    readable = [norm for norm in norms if norm.dtype in FLOATS and len(norm.shape) == 1 and norm.shape[0]]  # others are refused later
    means = [float(to_float32(norm.read(0, 1), norm.type).mean(dtype=np.float64)) for norm in readable]
    return median(means) if means else None


def _without_addition(row: Row, mtp_added: bool) -> Row:
    is_added = row.value is plus_one and (mtp_added or not row.source.startswith("mtp."))
    return replace(row, value=None) if is_added else row
