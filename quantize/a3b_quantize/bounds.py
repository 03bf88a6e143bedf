"""clip_bounds.bin: measured activation ranges of a model. docs/clip-bounds.md is the specification; the layout does not change."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.part import part_file
from a3b_gguf.roles import layer_of
from a3b_gguf.split import shards
from a3b_quantize.histogram import Histogram

MAGIC = b"A3BCLIP1"
ALIGNMENT = 64
FILE_NAME = "clip_bounds.bin"
SITES = ("attn_in", "k_cache", "v_cache", "attn_out_in", "ssm_in", "ssm_out_in", "ffn_in", "down_in", "down_out", "residual")
ALL_EXPERTS = -1
RECORD = np.dtype(
    [
        ("layer", "<u2"), ("site", "<u2"), ("expert", "<i4"), ("count", "<u8"), ("non_finite", "<u4"), ("absmax", "<f4"), ("p50", "<f4"),
        ("p99", "<f4"), ("p99_9", "<f4"), ("p99_99", "<f4"), ("sum32", "<f4"), ("zero", "<u4"),
    ]
)  # fmt: skip
FRACTIONS = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "p99_99": 0.9999}


@dataclass(frozen=True, slots=True)
class Record:
    """The range of |x| at one site of one layer. expert: -1 for all; sum32: the largest |sum over 32 neighbouring channels|."""

    layer: int
    site: str
    expert: int
    count: int
    non_finite: int
    absmax: float
    p50: float
    p99: float
    p99_9: float
    p99_99: float
    sum32: float


@dataclass(frozen=True, slots=True)
class Header:
    """What was measured, and with what. model_id, file_sha256: see the functions of these names; tokens: how many were decoded."""

    model: str
    architecture: str
    model_id: str
    file_sha256: str
    tokens: int
    data_name: str
    data_sha256: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Bounds:
    """A whole file."""

    header: Header
    records: tuple[Record, ...]


def record(layer: int, site: str, expert: int, seen: Histogram) -> Record:
    """What `seen` says, as a record, in the precision of the file."""
    percentiles = {name: float(np.float32(seen.percentile(fraction))) for name, fraction in FRACTIONS.items()}
    with np.errstate(over="ignore"):
        sum32 = float(np.float32(seen.sum32))
    return Record(layer, site, expert, seen.count, seen.non_finite, seen.absmax, sum32=sum32, **percentiles)


def write_bounds(path: Path, header: Header, records: Sequence[Record]) -> None:
    """Writes `path` whole or not at all. Values beyond float32 become its infinity."""
    text = json.dumps({**_nested(header), "records": len(records)}, ensure_ascii=False).encode()
    start = MAGIC + struct.pack("<I", len(text)) + text
    table = np.zeros(len(records), RECORD)
    with np.errstate(over="ignore"):
        for row, each in zip(table, records, strict=True):
            row["site"] = SITES.index(each.site)
            for name, value in asdict(each).items():
                if name != "site":
                    row[name] = value
    data = start.ljust(_aligned(len(start)), b"\0") + table.tobytes()
    with part_file(path, len(data)) as out:
        out.write(data)


def read_bounds(path: Path) -> Bounds:
    """The file, checked byte by byte. Raises BadInput for anything that is not a whole clip_bounds.bin."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "`a3b quantize` writes one beside its output") from error
    header, n_records, at = _read_header(path, data)
    if len(data) != at + n_records * RECORD.itemsize:
        raise BadInput(
            f"{path} has {len(data):,} bytes, its header promises {n_records:,} records and so {at + n_records * RECORD.itemsize:,}",
            "the file was cut or added to; measure again",
        )
    table = np.frombuffer(data, RECORD, n_records, at)
    bad = np.flatnonzero((table["site"] >= len(SITES)) | (table["expert"] < ALL_EXPERTS) | (table["zero"] != 0))
    if bad.size:
        row = table[bad[0]]
        raise BadInput(f"{path}: record {bad[0]} has site {row['site']}, expert {row['expert']} and {row['zero']} in its last field")
    return Bounds(header, tuple(_record(row) for row in table))


def check_model(bounds: Bounds, file: GGUFFile, path: Path) -> str:
    """Raises BadInput when `bounds`, read from `path`, are of another model than `file`; returns a note, or "" when all is the same."""
    header = bounds.header
    if header.model_id != model_id(file):
        raise BadInput(
            f"{path} was measured on another model: {header.model}, model_id {header.model_id[:12]}; {file.path} has {model_id(file)[:12]}",
            "measure this model, or give the file that belongs to it",
        )
    if header.file_sha256 != file_sha256(file):
        return f"{path} was measured on another quantization of this model"
    return ""


def model_id(file: GGUFFile) -> str:
    """The same for every quantization of a model: sha256 over its F32 norm tensors, MTP block left out.

    Over all tensors of type F32 whose name ends in "_norm.weight" and whose block is below block_count - nextn_predict_layers, in the order
    of their names' bytes: name, a zero byte, the tensor's bytes.
    """
    n_trunk = int(file.hparam("block_count", 0)) - int(file.hparam("nextn_predict_layers", 0))
    norms = [
        (info.name.encode(), part.path, info)
        for part in (file, *shards(file))
        for info in part.tensors
        if info.type.name == "f32" and info.name.endswith("_norm.weight")
    ]
    digest = hashlib.sha256()
    for name, path, info in sorted(norms, key=lambda norm: norm[0]):
        layer = layer_of(info.name)
        if layer is None or layer < n_trunk:
            with path.open("rb") as data:
                data.seek(info.offset)
                digest.update(name + b"\0" + data.read(info.nbytes))
    return digest.hexdigest()


def file_sha256(file: GGUFFile) -> str:
    """sha256 over the tensor table as it stands in the file: the same only for the same tensors in the same types and order.

    Of a split model, over the tables of all its parts.
    """
    digest = hashlib.sha256()
    for part in (file, *shards(file)):
        for info in part.tensors:
            name = info.name.encode()
            digest.update(struct.pack("<Q", len(name)) + name + struct.pack("<I", len(info.shape)))
            digest.update(struct.pack(f"<{len(info.shape)}QIQ", *reversed(info.shape), info.type.number, info.offset - part.data_offset))
    return digest.hexdigest()


def _read_header(path: Path, data: bytes) -> tuple[Header, int, int]:
    """The header, how many records it promises, and where they start."""
    if data[: len(MAGIC)] != MAGIC:
        raise BadInput(f"{path} is not a clip_bounds file: it starts with {data[:8]!r}, expected {MAGIC!r}")
    if len(data) < len(MAGIC) + 4:
        raise BadInput(f"{path} is cut off after {len(data)} bytes, in its header")
    length = struct.unpack_from("<I", data, len(MAGIC))[0]
    end = len(MAGIC) + 4 + length
    at = _aligned(end)
    if at > len(data):
        raise BadInput(f"{path} is cut off: its header ends at byte {at:,}, the file at {len(data):,}", "measure again")
    try:
        found: dict[str, Any] = json.loads(data[len(MAGIC) + 4 : end])
        header = Header(
            model=str(found["model"]), architecture=str(found["architecture"]), model_id=str(found["model_id"]),
            file_sha256=str(found["file_sha256"]), tokens=int(found["tokens"]),
            data_name=str(found["data"]["name"]), data_sha256=str(found["data"]["sha256"]),
            versions={str(key): str(value) for key, value in found["versions"].items()},
        )  # fmt: skip
        n_records = int(found["records"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: its header is not what it must be: {type(error).__name__}: {error}", "measure again") from error
    if n_records < 0 or any(data[end:at]):
        raise BadInput(f"{path}: {n_records} records, or padding after the header that is not zero")
    return header, n_records, at


def _nested(header: Header) -> dict[str, Any]:
    """The header as its JSON has it."""
    flat = asdict(header)
    data = {"name": flat.pop("data_name"), "sha256": flat.pop("data_sha256")}
    versions = flat.pop("versions")
    return {**flat, "data": data, "versions": versions}


def _record(row: Any) -> Record:
    values = {name: row[name].item() for name in RECORD.names or () if name not in ("site", "zero")}
    return Record(site=SITES[row["site"]], **values)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def beside(output: Path) -> Path:
    """Where the bounds of the file `output` belong."""
    return output.with_name(FILE_NAME)
