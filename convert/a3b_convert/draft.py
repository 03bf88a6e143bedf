"""The MTP block alone, as a file that drafts tokens for the model it belongs to.

llama.cpp wants the embedding, the final norm and the output in it too, and the metadata of the whole model.
Source: filter_tensors of _QwenMtpMixin in llama.cpp conversion/qwen.py, its `mtp_only`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from a3b_convert.archs.base import Row, Table
from a3b_convert.safetensors_file import SafeTensor
from a3b_gguf.errors import BadInput

TRUNK = "model.layers."


def draft_only(folder: Path, table: Table, tensors: Mapping[str, SafeTensor], n_mtp: int) -> tuple[Table, dict[str, SafeTensor], list[str]]:
    """Rows and tensors without the trunk's layers, and a note. Raises BadInput when there is no MTP block."""
    if not n_mtp:
        raise BadInput(f"{folder} has no mtp.* tensors: there is no MTP block to write", "convert without --mtp-only")
    rows = [entry for entry in table if not (entry if isinstance(entry, Row) else entry[0][0]).source.startswith(TRUNK)]
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(TRUNK)}
    return rows, kept, [f"left out: {len(tensors) - len(kept)} tensors of the trunk's layers (--mtp-only)"]
