"""Makes clip_bounds.bin of measured ranges, and says whose a file is. docs/clip-bounds.md is its specification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from a3b_gguf.clip_bounds import FILE_NAME as FILE_NAME
from a3b_gguf.clip_bounds import MAGIC, RECORD, SITES, START, Bounds, Header, Record, aligned, check_model_id, nested_header
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.model_id import file_sha256
from a3b_gguf.model_id import model_id as model_id
from a3b_gguf.part import write_file
from a3b_quantize.histogram import Histogram

FRACTIONS = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "p99_99": 0.9999}
RANGES = ("absmax", *FRACTIONS, "sum32")


def record(layer: int, site: str, expert: int, seen: Histogram) -> Record:
    """What `seen` says, as a record, in the precision of the file."""
    percentiles = {name: _float32(seen.percentile(fraction)) for name, fraction in FRACTIONS.items()}
    return Record(layer, site, expert, seen.count, seen.non_finite, seen.absmax, sum32=_float32(seen.sum32), **percentiles)


def write_bounds(path: Path, header: Header, records: Sequence[Record]) -> None:
    """Writes `path` whole or not at all. Values beyond float32 become its infinity."""
    text = json.dumps({**nested_header(header), "records": len(records)}, ensure_ascii=False).encode()
    start = START.pack(MAGIC, len(text)) + text
    rows = (
        RECORD.pack(
            each.layer, SITES.index(each.site), each.expert, each.count, each.non_finite,
            *(_float32(getattr(each, name)) for name in RANGES), 0,
        )
        for each in records
    )  # fmt: skip
    data = start.ljust(aligned(len(start)), b"\0") + b"".join(rows)
    write_file(path, data)


def check_model(bounds: Bounds, file: GGUFFile, path: Path) -> str:
    """Raises BadInput when `bounds`, read from `path`, are of another model than `file`; returns a note, or "" when all is the same."""
    check_model_id(bounds.header, path, model_id(file), file.path)
    if bounds.header.file_sha256 != file_sha256(file):
        return f"{path} was measured on another quantization of this model"
    return ""


def beside(output: Path) -> Path:
    """Where the bounds of the file `output` belong."""
    return output.with_name(FILE_NAME)


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
