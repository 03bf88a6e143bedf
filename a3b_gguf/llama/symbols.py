"""Functions of the ggml libraries that llama_cpp brings along and does not bind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from a3b_gguf.errors import MachineLacks

LIBRARY_SUFFIXES = (".so", ".dylib", ".dll")


def ggml_function(name: str, restype: Any, argtypes: Sequence[Any]) -> Callable[..., Any]:
    """The C function `name` of libllama or of a ggml library that it was linked with; calls release the GIL.

    restype and argtypes are ctypes types; they belong to the returned object alone, so callers cannot disturb each other.
    On Linux and macOS a look-up in libllama reaches its dependencies; on Windows each ggml library is opened by its name.
    Raises MachineLacks when no library of the installed llama-cpp-python has the function.
    """
    for library in _libraries():
        try:
            function = library[name]
        except AttributeError:
            continue
        function.restype, function.argtypes = restype, list(argtypes)
        return function
    raise MachineLacks(f"the installed llama-cpp-python has no function {name}", "install the version that a3b's pyproject.toml pins")


def _libraries() -> Iterator[ctypes.CDLL]:
    yield C._lib
    for path in sorted(Path(C._base_path).iterdir()):
        if path.name.removeprefix("lib").startswith("ggml") and path.suffix in LIBRARY_SUFFIXES:
            yield ctypes.CDLL(str(path))
