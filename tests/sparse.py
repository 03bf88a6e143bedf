"""Checkpoints of the true sizes as files of holes: names and shapes are real, every number is 0."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import numpy as np


def unpacked(item: tuple[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """A packed expert tensor's name and shape as those of its experts."""
    name, shape = item
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [item]
    base, _, kind = name.rpartition(".")
    parts = {"gate_proj": (shape[1] // 2, shape[2]), "up_proj": (shape[1] // 2, shape[2])} if "gate" in kind else {kind: shape[1:]}
    return [(f"{base}.{e}.{part}.weight", wanted) for e in range(shape[0]) for part, wanted in parts.items()]


def sparse_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A bf16 file of holes."""
    ends = list(itertools.accumulate(2 * int(np.prod(shape)) for shape in shapes.values()))
    spans = zip([0, *ends], ends, strict=False)
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": span} for (name, shape), span in zip(shapes.items(), spans, strict=True)
    }
    text = json.dumps(entries).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + ends[-1])
