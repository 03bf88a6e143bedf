"""llama_model_quantize of the installed llama_cpp: the oracle for types and bytes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import llama_cpp.llama_cpp as C
import numpy as np

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


def llama_quantize(source: Path, output: Path, file_type: int, pure: bool = False, threads: int = 2) -> Path:
    """Quantizes with llama_model_quantize and returns `output`."""
    params = C.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = file_type, pure, threads
    _run(source, output, params)
    return output


def _run(source: Path, output: Path, params: C.llama_model_quantize_params) -> str:
    with LlamaLog() as log:
        status = C.llama_model_quantize(str(source).encode(), str(output).encode(), ctypes.byref(params))
        text = "\n".join(line.text for line in log.lines())
    assert status == 0, text
    return text
