"""`a3b calibrate --merge`: several calibrations of one model added up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from a3b_gguf.clip_bounds import FILE_NAME as BOUNDS_NAME
from a3b_gguf.clip_bounds import Header, check_model_id
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.calibrate import Calibrated
from a3b_gguf.flows.calibration_folder import IMATRIX_NAME, output_folder
from a3b_gguf.model_id import model_id
from a3b_gguf.split import read_parts
from a3b_quantize.bounds import write_bounds
from a3b_quantize.coverage import coverage
from a3b_quantize.histogram import Histogram
from a3b_quantize.histograms_file import FILE_NAME as HISTOGRAMS_NAME
from a3b_quantize.histograms_file import merge, read_histograms, write_histograms
from a3b_quantize.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from a3b_quantize.measure import header_for
from a3b_quantize.sites import records


def merge_folders(path: Path, folders: Sequence[Path], folder: Path) -> Calibrated:
    """Adds up what `a3b calibrate` wrote into `folders`, of the model at `path`: the same as one run over all their texts."""
    twice = next((each for number, each in enumerate(folders) if each.resolve() in (other.resolve() for other in folders[:number])), None)
    if twice is not None:
        raise UsageError(f"--merge: {twice} is named twice, its text would count twice", "name each folder once")
    file = read_parts(path)[0]
    identity = model_id(file)
    total: dict[str, ImatrixEntry] = {}
    ranges: dict[tuple[int, str], Histogram] = {}
    headers: list[Header] = []
    datasets: list[str] = []
    n_chunks, sizes = 0, set()
    for each in folders:
        header, seen = read_histograms(each / HISTOGRAMS_NAME)
        check_model_id(header, each / HISTOGRAMS_NAME, identity, path)
        imatrix = read_imatrix(each / IMATRIX_NAME)
        merge(ranges, seen)
        _add(total, imatrix, each)
        headers.append(header)
        datasets += imatrix.datasets
        n_chunks += imatrix.chunk_count
        sizes.add(imatrix.chunk_size)
    if len(sizes) != 1:
        raise UsageError(f"--merge: chunks of {' and '.join(map(str, sorted(sizes)))} tokens", "merge runs of the same --ctx")
    names = tuple(dict.fromkeys(datasets))
    digest = hashlib.sha256("".join(header.data_sha256 for header in headers).encode()).hexdigest()
    n_tokens = sum(header.tokens for header in headers)
    header = replace(header_for(file, n_tokens, " + ".join(names), digest), file_sha256=_common(header.file_sha256 for header in headers))
    with output_folder(folder, (IMATRIX_NAME, HISTOGRAMS_NAME, BOUNDS_NAME)) as out:
        write_imatrix(out / IMATRIX_NAME, Imatrix(total, sizes.pop(), n_chunks, names))
        write_histograms(out / HISTOGRAMS_NAME, header, ranges)
        write_bounds(out / BOUNDS_NAME, header, records(ranges))
    covered = coverage({name: entry.counts.astype("int64") for name, entry in total.items()})
    paths = (out / IMATRIX_NAME, None, out / BOUNDS_NAME, out / HISTOGRAMS_NAME)
    return Calibrated(out, *paths, len(total), " + ".join(names), n_tokens, n_chunks, n_chunks, False, 0, covered, ())


def _add(total: dict[str, ImatrixEntry], imatrix: Imatrix, folder: Path) -> None:
    for name, entry in imatrix.entries.items():
        mine = total.get(name)
        if mine is not None and mine.sums.shape != entry.sums.shape:
            raise BadInput(f"{folder / IMATRIX_NAME}: entry {name} has another shape than in the folder before", "merge runs of one model")
        total[name] = entry if mine is None else ImatrixEntry(mine.sums + entry.sums, mine.counts + entry.counts)


def _common(values: Iterator[str]) -> str:
    """The value that all share; "" when they do not: then the ranges are of no single file."""
    found = set(values)
    return found.pop() if len(found) == 1 else ""
