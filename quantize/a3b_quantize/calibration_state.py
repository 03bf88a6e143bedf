"""What a calibration has collected so far, on disk: a killed run goes on where it was, and ends with the same numbers."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.part import write_file
from a3b_quantize.histogram import Histogram
from a3b_quantize.histograms_file import pack, unpack
from a3b_quantize.inputs import Sums

FILE_NAME = "calibration.state"


@dataclass(slots=True)
class State:
    """done: chunks that are in; groups, group_of: as in Inputs; ranges: by layer and site."""

    done: int = 0
    groups: dict[str, Sums] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    ranges: dict[tuple[int, str], Histogram] = field(default_factory=dict)


def save_state(path: Path, key: bytes, state: State) -> None:
    """Replaces `path` as a whole. key: says of what run this is."""
    arrays: dict[str, NDArray[Any]] = {f"range.{name}": values for name, values in pack(state.ranges).items()}
    for number, sums in enumerate(state.groups.values()):
        arrays[f"sums.{number}"], arrays[f"counts.{number}"] = sums.sums, sums.counts
        if sums.capped is not None:
            arrays[f"capped.{number}"] = sums.capped
    about = {"key": key.hex(), "done": state.done, "groups": list(state.groups), "group_of": state.group_of}
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
    write_file(path, data.getbuffer())


def load_state(path: Path, key: bytes) -> State | None:
    """The state in `path`, when there is one of the same run and whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            if about["key"] != key.hex():
                return None
            ranges = unpack({name.removeprefix("range."): arrays[name] for name in arrays if name.startswith("range.")})
            groups = {name: _sums(arrays, number) for number, name in enumerate(about["groups"])}
            return State(int(about["done"]), groups, dict(about["group_of"]), ranges)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile):
        return None  # a file of something else, or one that a full disk cut: begin again


def _sums(arrays: Any, number: int) -> Sums:
    capped = f"capped.{number}"
    return Sums(arrays[f"sums.{number}"], arrays[f"counts.{number}"], arrays[capped] if capped in arrays else None)
