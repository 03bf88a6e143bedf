"""What `a3b inspect` says of a clip_bounds.bin: ranges by site, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from a3b_gguf.clip_bounds import MAGIC, SITES, Bounds, KVAdvice, Record, kv_advice, read_bounds
from a3b_gguf.errors import BadInput
from a3b_quantize.protect import Standout, overflows, standouts


@dataclass(frozen=True, slots=True)
class SiteRow:
    """One site over all layers: its records by layer. experts: how many records of single experts there are."""

    site: str
    layers: tuple[Record, ...]
    experts: int

    @property
    def largest(self) -> Record:
        return max(self.layers, key=lambda record: record.absmax)


@dataclass(frozen=True, slots=True)
class BoundsSummary:
    """path: of the file; overflow: records that come near the end of float16; advice: None when the caches were not measured."""

    path: Path
    bounds: Bounds
    sites: tuple[SiteRow, ...]
    standouts: tuple[Standout, ...]
    overflow: tuple[Record, ...]
    advice: KVAdvice | None


def is_bounds(path: Path) -> bool:
    """Whether the file says that it is a clip_bounds.bin. False when it cannot be read."""
    try:
        if not path.is_file():  # opening a pipe would wait for whoever writes it
            return False
        with path.open("rb") as data:
            return data.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def summarise_bounds(path: Path) -> BoundsSummary:
    """Reads the whole file. Raises BadInput when it is damaged."""
    bounds = read_bounds(path)
    rows = []
    for site in SITES:
        found = bounds.of(site)
        experts = sum(1 for record in bounds.records if record.site == site and record.expert >= 0)
        if found:
            rows.append(SiteRow(site, tuple(found[layer] for layer in sorted(found)), experts))
    try:
        advice = kv_advice(path, bounds.header.model_id)
    except BadInput:
        advice = None
    return BoundsSummary(path, bounds, tuple(rows), standouts(bounds), overflows(bounds), advice)
