"""clip_bounds.bin as values: measured activation ranges of a model, read without numpy. docs/clip-bounds.md is the specification.

Writing and measuring: a3b_quantize.bounds and a3b_quantize.calibrate.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput

MAGIC = b"A3BCLIP1"
ALIGNMENT = 64
FILE_NAME = "clip_bounds.bin"
SITES = ("attn_in", "k_cache", "v_cache", "attn_out_in", "ssm_in", "ssm_out_in", "ffn_in", "down_in", "down_out", "residual")
ALL_EXPERTS = -1
# What goes into the down projection of a layer's shared expert. In files it has site down_in and the expert number after the last routed
# expert; it is in no record of all experts.
SHARED_DOWN_IN = "shared_down_in"
# layer, site, expert, count, non_finite, absmax, p50, p99, p99.9, p99.99, sum32, zero
RECORD = struct.Struct("<HHiQIffffffI")
START = struct.Struct("<8sI")
F16_MAX = 65504.0


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
    """What was measured, and with what. model_id, file_sha256: see a3b_gguf.model_id; tokens: how many were decoded."""

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

    def of(self, site: str) -> dict[int, Record]:
        """The records of `site` over all experts, by layer."""
        return {each.layer: each for each in self.records if each.site == site and each.expert == ALL_EXPERTS}


@dataclass(frozen=True, slots=True)
class KVAdvice:
    """The smallest cache types that the measured ranges allow, names of llama.params.KV_TYPES; why: in one sentence."""

    k: str
    v: str
    why: str
    notes: tuple[str, ...] = field(default=())


def read_bounds(path: Path) -> Bounds:
    """The file, checked byte by byte. Raises BadInput for anything that is not a whole clip_bounds.bin."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "`a3b quantize` writes one beside its output") from error
    header, n_records, at = _read_header(path, data)
    if len(data) != at + n_records * RECORD.size:
        raise BadInput(
            f"{path} has {len(data):,} bytes, its header promises {n_records:,} records and so {at + n_records * RECORD.size:,}",
            "the file was cut or added to; measure again",
        )
    return Bounds(header, tuple(_record(path, number, row) for number, row in enumerate(RECORD.iter_unpack(data[at:]))))


def check_model_id(header: Header, path: Path, model_id: str, of: Path | str) -> None:
    """Raises BadInput when the file at `path` is of another model than `of`, whose id is `model_id`."""
    if header.model_id != model_id:
        raise BadInput(
            f"{path} was measured on another model: {header.model}, model_id {header.model_id[:12]}; {of} has {model_id[:12]}",
            "measure this model, or give the file that belongs to it",
        )


# Rounding of a cache type against the bulk of the values, as a share of their standard deviation: half the step's range over sqrt(12).
# A block's step follows its largest value, taken as the 99.9th percentile; the deviation is that of a normal distribution with the same
# median of |x|. For normal values this gives 0.8 % (q8_0) and 12 % (q4_0); an outlier channel raises it, since the others of its block
# share its step.
STEPS = {"q8_0": 127.0, "q4_0": 8.0}
NORMAL_MEDIAN = 0.6745
# q4_0 is for V alone: an error of K is multiplied by the query and goes through the softmax.
MOST_NOISE = {"q8_0": 0.05, "q4_0": 0.15}
HEADROOM = 2.0  # another text may reach beyond what was measured


def kv_advice(path: Path, model_id: str) -> KVAdvice:
    """What the ranges in `path` say about K and V caches of the model with this id.

    Raises BadInput when the file is damaged, of another model, or lacks the caches' sites.
    """
    bounds = read_bounds(path)
    check_model_id(bounds.header, path, model_id, "the model")
    keys, values = bounds.of("k_cache"), bounds.of("v_cache")
    if not keys or not values:
        raise BadInput(f"{path} has no ranges of the {'keys' if not keys else 'values'} in the cache", "measure again with `a3b calibrate`")
    k, why_k = _smallest(keys.values(), ("q8_0",), "keys")
    v, why_v = _smallest(values.values(), ("q4_0", "q8_0"), "values")
    return KVAdvice(k, v, f"{why_k}; {why_v}")


def noise(kind: str, record: Record) -> float:
    """Rounding error of the cache type `kind` at this site, as a share of the values' standard deviation. See STEPS."""
    if record.p99_9 == 0:
        return 0.0
    return inf if record.p50 == 0 else record.p99_9 / STEPS[kind] / 12**0.5 / (record.p50 / NORMAL_MEDIAN)


def _smallest(records: Iterable[Record], candidates: tuple[str, ...], what: str) -> tuple[str, str]:
    """The first of `candidates`, f16 or bf16 that holds these ranges, and why."""
    records = tuple(records)
    largest = max(records, key=lambda each: each.absmax)
    bad = next((each for each in records if each.non_finite), None)
    if bad:
        return "bf16", f"{bad.non_finite:,} {what} of layer {bad.layer} were not finite"
    if largest.absmax * HEADROOM > F16_MAX:
        return "bf16", f"{what} reach {largest.absmax:,.4g} in layer {largest.layer}, near the end of f16"
    said = ""
    for kind in candidates:
        worst = max(records, key=lambda each: noise(kind, each))
        share = noise(kind, worst)
        said = f"{kind} would round {what} of layer {worst.layer} by {share:.1%} of their deviation, {MOST_NOISE[kind]:.0%} is allowed"
        if share <= MOST_NOISE[kind]:
            return kind, said
    return "f16", said


def header_of(found: dict[str, Any]) -> Header:
    """The header that `found`, its JSON, says. Raises KeyError, TypeError, ValueError or AttributeError when something is missing."""
    return Header(
        model=str(found["model"]), architecture=str(found["architecture"]), model_id=str(found["model_id"]),
        file_sha256=str(found["file_sha256"]), tokens=int(found["tokens"]),
        data_name=str(found["data"]["name"]), data_sha256=str(found["data"]["sha256"]),
        versions={str(key): str(value) for key, value in found["versions"].items()},
    )  # fmt: skip


def nested_header(header: Header) -> dict[str, Any]:
    """The header as its JSON has it."""
    flat = asdict(header)
    data = {"name": flat.pop("data_name"), "sha256": flat.pop("data_sha256")}
    versions = flat.pop("versions")
    return {**flat, "data": data, "versions": versions}


def _read_header(path: Path, data: bytes) -> tuple[Header, int, int]:
    """The header, how many records it promises, and where they start."""
    if data[: len(MAGIC)] != MAGIC:
        raise BadInput(f"{path} is not a clip_bounds file: it starts with {data[:8]!r}, expected {MAGIC!r}")
    if len(data) < START.size:
        raise BadInput(f"{path} is cut off after {len(data)} bytes, in its header")
    end = START.size + START.unpack_from(data)[1]
    at = aligned(end)
    if at > len(data):
        raise BadInput(f"{path} is cut off: its header ends at byte {at:,}, the file at {len(data):,}", "measure again")
    try:
        found: dict[str, Any] = json.loads(data[START.size : end])
        header = header_of(found)
        n_records = int(found["records"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path}: its header is not what it must be: {type(error).__name__}: {error}", "measure again") from error
    if n_records < 0 or any(data[end:at]):
        raise BadInput(f"{path}: {n_records} records, or padding after the header that is not zero")
    return header, n_records, at


def _record(path: Path, number: int, row: tuple[Any, ...]) -> Record:
    layer, site, expert, count, non_finite, *ranges, zero = row
    if site >= len(SITES) or expert < ALL_EXPERTS or zero:
        raise BadInput(f"{path}: record {number} has site {site}, expert {expert} and {zero} in its last field")
    if not all(0 <= value for value in ranges):  # NaN is not either
        raise BadInput(f"{path}: record {number} has a range that is NaN or negative", "measure again")
    return Record(layer, SITES[site], expert, count, non_finite, *ranges)


def aligned(n_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
