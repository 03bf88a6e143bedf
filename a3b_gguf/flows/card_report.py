"""What `a3b quantize --report` found, carried beside the evaluation under a3b.quantize.*, and its part of the card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.metadata import Metadata, array, f32, string, u32
from a3b_gguf.split import read_parts
from a3b_quantize.kernels import EFFORTS

PREFIX = "a3b.quantize."
NOT_KNOWN = -1.0  # GGUF arrays have no null
LARGEST_F32 = 3.4028234663852886e38


def report_metadata(path: Path, model: Path) -> Metadata:
    """The report's errors by role as GGUF metadata. Raises BadInput for a file that is no report, or one of another model file."""
    hint = "give the file that `a3b quantize --report FILE` wrote for this model"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        roles = found["roles"]
        sizes = {_text(each["name"]): (each["type"], each["nbytes"]) for each in found["tensors"]}
        if not sizes:
            raise ValueError("it is about no tensor")
        result: Metadata = {
            PREFIX + "kernel": string(_text(found["kernel"])),
            PREFIX + "effort": u32(_effort(found["effort"])),
            PREFIX + "imatrix": string(_text(found["imatrix"] or "")),
            PREFIX + "error": f32(_number(found["error"])),
            PREFIX + "roles": array("str", [_role(row) for row in roles]),
            PREFIX + "errors": array("f64", [_number(row["error"]) for row in roles]),
            PREFIX + "weighted_errors": array("f64", [_number(row["weighted_error"]) for row in roles]),
        }
    except OSError as error:
        raise BadInput(f"--report: {path}: {error.strerror}", hint) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"--report: {path} is not a report: {type(error).__name__}: {error}", hint) from error
    here = {tensor.name: (tensor.type.name, tensor.nbytes) for part in read_parts(model) for tensor in part.tensors}
    other = next((name for name, size in sizes.items() if here.get(name) != size), None)
    if other is not None:
        there, found_here = sizes[other], here.get(other, "missing")
        raise BadInput(f"--report: {path} is about another file: {other} is {there} there and {found_here} in {model}", hint)
    return result


def _number(value: Any) -> float:
    """Raises ValueError for what is no share of energy."""
    if value is None:
        return NOT_KNOWN
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST_F32:
        raise ValueError(f"{value!r} is no error of a quantization")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _effort(value: Any) -> int:
    if value not in (0, *EFFORTS):  # 0: ggml's kernels
        raise ValueError(f"{value!r} is no effort")
    return int(value)


def _role(row: Any) -> str:
    """Three words, as the card takes them apart again."""
    words = [_text(row["role"]), _text(row["type"]), str(row["group_size"])]
    if any(not word or " " in word for word in words):
        raise ValueError(f"{' '.join(words)!r} is no role, type and group size")
    return " ".join(words)


def report_lines(file: GGUFFile) -> Iterator[str]:
    """The part of the card, empty when the file carries no report."""
    roles = file.get(PREFIX + "roles")
    if not roles:
        return
    imatrix = file.get(PREFIX + "imatrix")
    weighting = f"importance from {imatrix}" if imatrix else "no importance"
    how = f"{file.get(PREFIX + 'kernel')} kernels, effort {file.get(PREFIX + 'effort')}, {weighting}"
    yield from ("", f"Error against the source: {file.get(PREFIX + 'error'):.5f} of the weights' energy ({how}).", "")
    yield from ("| role | type | relative error | weighted by importance |", "| --- | --- | ---: | ---: |")
    for text, error, weighted in zip(roles, file.get(PREFIX + "errors"), file.get(PREFIX + "weighted_errors"), strict=True):
        role, kind, group_size = text.split(" ")
        group = "" if group_size == "32" else f", groups of {group_size}"
        yield f"| {role} | {kind}{group} | {_shown(error)} | {_shown(weighted)} |"


def _shown(value: float) -> str:
    return "" if value == NOT_KNOWN else f"{value:.5f}"
