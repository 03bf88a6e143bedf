"""llama_model_quantize of the installed llama_cpp: the oracle for types and bytes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from a3b_gguf.llama.log import LlamaLog

LINE = re.compile(r"^\[ *\d+/ *\d+\] (\S+) .*type = +(\w+), *\nsize = .*?(?:\((\w+)\))?$", re.MULTILINE)


def dry_run_types(path: Path, file_type: int, with_imatrix: bool = False) -> dict[str, str]:
    """Tensor name -> the type that llama-quantize would give it, told from what it prints. Reads no weights."""
    params = C.llama_model_quantize_default_params()
    params.ftype, params.dry_run, params.nthread = file_type, True, 1
    values = np.ones(1, np.float32)
    entries = (C.llama_model_imatrix_data * 2)()  # one entry that fits no tensor, and the terminator
    entries[0].name, entries[0].size = b"none", 1
    entries[0].data = ctypes.cast(values.ctypes.data, type(entries[0].data))
    if with_imatrix:
        params.imatrix = ctypes.cast(entries, type(params.imatrix))
    text = _run(path, path.with_name("never-written.gguf"), params)
    return {found[1]: (found[3] or found[2]).lower() for found in LINE.finditer(text)}


def llama_quantize(
    source: Path,
    output: Path,
    file_type: int,
    pure: bool = False,
    importance: Mapping[str, NDArray[np.float32]] | None = None,
    tensor_types: Sequence[tuple[str, int]] = (),
    allow_requantize: bool = False,
) -> Path:
    """Quantizes with llama_model_quantize and returns `output`.

    importance: float32 values by tensor name, as llama-quantize hands them over; tensor_types: (regex, ggml type).
    """
    params = C.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread, params.allow_requantize = file_type, pure, 2, allow_requantize
    values = {name: np.ascontiguousarray(each, np.float32) for name, each in (importance or {}).items()}
    entries = (C.llama_model_imatrix_data * (len(values) + 1))()
    for entry, (name, each) in zip(entries, values.items(), strict=False):
        entry.name, entry.size, entry.data = name.encode(), each.size, ctypes.cast(each.ctypes.data, type(entry.data))
    if values:
        params.imatrix = ctypes.cast(entries, type(params.imatrix))
    overrides = (C.llama_model_tensor_override * (len(tensor_types) + 1))()
    for override, (regex, number) in zip(overrides, tensor_types, strict=False):
        override.pattern, override.type = regex.encode(), number
    if tensor_types:
        params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))
    _run(source, output, params)
    return output


def _run(source: Path, output: Path, params: C.llama_model_quantize_params) -> str:
    with LlamaLog() as log:
        status = C.llama_model_quantize(str(source).encode(), str(output).encode(), ctypes.byref(params))
        text = "\n".join(line.text for line in log.lines())
    assert status == 0, text
    return text
