"""Metadata that a load replaces without touching the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from a3b_gguf.errors import UsageError
from a3b_gguf.gguf_file import read_gguf


def expert_overrides(path: Path, n_expert_used: int) -> Any:
    """An array of llama_model_kv_override that makes the router choose `n_expert_used` experts a token; 0: as the file says.

    The array must live until the load returns. Raises UsageError for a model without experts or with fewer of them.
    """
    array = (C.llama_model_kv_override * 2)()  # the second, with an empty key, ends the list
    if not n_expert_used:
        return array
    file = read_gguf(path)
    n_expert = int(file.hparam("expert_count", 0))
    if not n_expert:
        raise UsageError(f"--experts: {path} has no routed experts", "leave --experts out")
    if not 1 <= n_expert_used <= n_expert:
        raise UsageError(f"--experts: {n_expert_used} of {n_expert} experts cannot be used", f"give 1 to {n_expert}")
    array[0].tag = C.LLAMA_KV_OVERRIDE_TYPE_INT
    array[0].key = f"{file.architecture}.expert_used_count".encode()
    array[0].value.val_i64 = n_expert_used
    return array
