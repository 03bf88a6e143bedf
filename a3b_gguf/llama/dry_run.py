"""What llama.cpp would take for LoadParams, told by its own allocator without allocating (llama_model_params.no_alloc).

Always in a process of its own: a parameter that llama.cpp does not like may end the process, and recurrent states are allocated
even then. A sparse file may be asked about; it must never be loaded for real.

    python -m a3b_gguf.llama.dry_run MODEL.gguf < load_params.json
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.buffers import Buffer
from a3b_gguf.llama.child import answer, ask
from a3b_gguf.llama.params import LoadParams

TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class DryRun:
    """buffers: by kind ("model", "context": KV cache and recurrent state, "compute", "output") and llama.cpp's buffer type.

    exact: they are from llama.cpp's own table. Where that cannot be read they are what it logs, to 0.01 MiB, "kv" and "recurrent"
    in place of "context", and model sizes are missing. n_ctx: tokens.
    """

    buffers: tuple[Buffer, ...]
    n_ctx: int
    exact: bool


def dry_run(path: Path, load: LoadParams) -> DryRun:
    """Raises what loading would raise, and MachineLacks when llama.cpp ends the child."""
    told = ask("a3b_gguf.llama.dry_run", path, load, TIMEOUT_SECONDS, "--no-dry-run leaves it out")
    return DryRun(tuple(Buffer(*each) for each in told["buffers"]), told["n_ctx"], told["exact"])


def tried(path: Path, load: LoadParams) -> dict[str, Any]:
    """The same in this process, as JSON has it."""
    from a3b_gguf.llama.buffers import printed_buffers
    from a3b_gguf.llama.load import load_model, open_context

    with load_model(path, load, dry=True) as model, open_context(model, load) as context:
        table = breakdown(context.pointer)
        printed = printed_buffers((*model.log, *context.log))
        found = printed if table is None else (*table, *(each for each in printed if each.kind == "output"))
        sizes = [[each.kind, each.device, each.n_bytes] for each in found]
        return {"buffers": sizes, "n_ctx": context.n_ctx, "exact": table is not None}


class _Map(ctypes.Structure):
    """The header of a std::map of libstdc++: 48 bytes, so it is returned through memory."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("compare", "color", "root", "left", "right", "count")]


class _Node(ctypes.Structure):
    """A node of it: ggml_backend_buffer_type_t and llama_memory_breakdown_data {model, context, compute}. Source: src/llama-context.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("color", "parent", "left", "right", "buft", "model", "context", "compute")]


KINDS = ("model", "context", "compute")
BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"


def breakdown(context: Any) -> tuple[Buffer, ...] | None:
    """llama_get_memory_breakdown, which returns a C++ map by value; None where the library or its C++ is another.

    The nodes are never freed: fine for a process that ends after it.
    """
    from a3b_gguf.llama.symbols import ggml_function

    if not sys.platform.startswith("linux"):
        return None
    try:
        ask = ggml_function(BREAKDOWN, _Map, [ctypes.c_void_p])
    except MachineLacks:
        return None
    name = ggml_function("ggml_backend_buft_name", ctypes.c_char_p, [ctypes.c_void_p])
    found: list[Buffer] = []
    header, n_nodes = ask(context), 0
    waiting = [header.root]
    while waiting:
        address = waiting.pop()
        if not address:
            continue
        node = _Node.from_address(address)
        waiting += [node.left, node.right]
        n_nodes += 1
        if n_nodes > header.count:
            return None
        device = name(node.buft).decode()
        found += [Buffer(kind, device, size) for kind in KINDS if (size := getattr(node, kind))]
    return tuple(found) if n_nodes == header.count else None


if __name__ == "__main__":
    answer(tried)
