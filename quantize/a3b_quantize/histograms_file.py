"""histograms.npz: what is behind the percentiles of clip_bounds.bin, so that measurements can be merged.

An .npz of numpy with these arrays, one row for each owner (a layer's site, or one expert of it) in `layer`, `site` and `expert`
(int32; expert is -1 where the site has none), `largest` (float32), `sums` (float64), and the bins that are not empty as rows of a sparse
matrix: `start` (int64, one more than rows), `bin` (uint16), `count` (int64). `header`: JSON, as in clip_bounds.bin.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import ALL_EXPERTS, SHARED_DOWN_IN, SITES, Header, header_of, nested_header
from a3b_gguf.errors import BadInput
from a3b_gguf.part import write_file
from a3b_quantize.histogram import N_BINS, Histogram
from a3b_quantize.sites import Ranges

FILE_NAME = "histograms.npz"
NUMBERED = (*SITES, SHARED_DOWN_IN)  # the number of a site in this file
Arrays = Mapping[str, NDArray[Any]]


def write_histograms(path: Path, header: Header, ranges: Ranges) -> None:
    """Writes `path` whole or not at all; the same ranges give the same bytes."""
    text = np.frombuffer(json.dumps(nested_header(header), ensure_ascii=False).encode(), np.uint8)
    data = io.BytesIO()
    np.savez_compressed(data, allow_pickle=False, header=text, **pack(ranges))
    write_file(path, data.getbuffer())


def read_histograms(path: Path) -> tuple[Header, dict[tuple[int, str], Histogram]]:
    """What `write_histograms` wrote. Raises BadInput for anything else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return header_of(json.loads(arrays["header"].tobytes())), unpack(arrays)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}", f"`a3b calibrate` writes {FILE_NAME}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path} is no {FILE_NAME}, or a damaged one: {type(error).__name__}: {error}", "calibrate again") from error


def pack(ranges: Ranges) -> dict[str, NDArray[Any]]:
    """The arrays of the file, without the header."""
    keys, rows = [], []
    for layer, site in sorted(ranges, key=lambda key: (key[0], NUMBERED.index(key[1]))):
        seen = ranges[layer, site]
        several = len(seen.counts) > 1
        for owner in range(len(seen.counts)):
            keys.append((layer, NUMBERED.index(site), owner if several else ALL_EXPERTS))
            rows.append((seen.counts[owner], seen.largest[owner], seen.sums[owner]))
    columns = np.array(keys, np.int32).reshape(-1, 3).T
    filled = [np.flatnonzero(counts) for counts, _, _ in rows]
    return {
        "layer": columns[0], "site": columns[1], "expert": columns[2],
        "largest": np.array([row[1] for row in rows], np.float32), "sums": np.array([row[2] for row in rows], np.float64),
        "start": np.cumsum([0, *map(len, filled)], dtype=np.int64),
        "bin": np.concatenate([*filled, np.empty(0, np.int64)]).astype(np.uint16),
        "count": np.concatenate([*(row[0][at] for row, at in zip(rows, filled, strict=True)), np.empty(0, np.int64)]),
    }  # fmt: skip


def unpack(arrays: Arrays) -> dict[tuple[int, str], Histogram]:
    """The ranges that `pack` packed. Raises ValueError, KeyError or IndexError for arrays that do not fit together."""
    layers, sites, experts, start = (arrays[name] for name in ("layer", "site", "expert", "start"))
    bins, counts, largest, sums = (arrays[name] for name in ("bin", "count", "largest", "sums"))
    if len({len(layers), len(sites), len(experts), len(largest), len(sums), len(start) - 1}) != 1 or len(bins) != len(counts):
        raise ValueError("its arrays have different lengths")
    owners: dict[tuple[int, str], int] = {}
    for layer, site, expert in zip(layers.tolist(), sites.tolist(), experts.tolist(), strict=True):
        key = (layer, NUMBERED[site])
        owners[key] = max(owners.get(key, 1), expert + 1)
    if np.any(bins > N_BINS) or np.any(counts < 0) or np.any(sites < 0):
        raise ValueError("a site, a bin or a count is out of its range")
    found = {key: Histogram(n) for key, n in owners.items()}
    for row, (layer, site, expert) in enumerate(zip(layers.tolist(), sites.tolist(), experts.tolist(), strict=True)):
        seen, owner = found[layer, NUMBERED[site]], max(expert, 0)
        at = slice(int(start[row]), int(start[row + 1]))
        seen.counts[owner, bins[at]] = counts[at]
        seen.largest[owner], seen.sums[owner] = largest[row], sums[row]
    return found


def merge(ranges: dict[tuple[int, str], Histogram], others: Ranges) -> None:
    """Adds `others` to `ranges`: the same as one measurement over both texts."""
    for key, seen in others.items():
        mine = ranges.setdefault(key, Histogram(len(seen.counts)))
        if len(mine.counts) != len(seen.counts):
            raise BadInput(f"layer {key[0]}, {key[1]}: {len(mine.counts)} experts in one measurement, {len(seen.counts)} in the other")
        mine.merge(seen)
