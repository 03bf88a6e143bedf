"""What attention takes on this processor, with flash attention and without it, by llama.cpp's own operations on a cache made for that.

Which way is faster was measured to differ between processors, widths of heads and lengths of texts.
Source: build_attn and build_attn_mha in src/llama-graph.cpp; cpy_k, cpy_v, get_k and get_v in src/llama-kv-cache.cpp.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.symbols import ggml_function

F32, F16, I64 = 0, 1, 27  # enum ggml_type
F32_BYTES, F16_BYTES, I64_BYTES = 4, 2, 8
MOST_LAYERS = 12
MOST_LAYERS_READING = 1  # reading computes more than it waits for memory
ROWS = 512, 256  # of a prompt at a time, with flash attention and without, as the planner takes them
MOST_ROUNDS, LEAST_ROUNDS = 40, 3
SECONDS = 0.3
SPARE = 8 << 20  # bytes for the graph itself
FLUSHED = 64 << 20  # bytes that are read before a round

Pointer = ctypes.c_void_p
Tensor = Any  # the address of a ggml_tensor


class _Plan(ctypes.Structure):
    """struct ggml_cplan of ggml-cpu.h."""

    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", Pointer),
        ("n_threads", ctypes.c_int),
        ("threadpool", Pointer),
        ("abort_callback", Pointer),
        ("abort_callback_data", Pointer),
        ("use_ref", ctypes.c_bool),
    ]


class _InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", Pointer), ("no_alloc", ctypes.c_bool)]


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of a model: layers that have it, heads, numbers in one of K and of V."""

    n_layer: int
    n_head: int
    n_head_kv: int
    k_dim: int
    v_dim: int


def attention_seconds(heads: Heads, n_ctx: int, n_kv: int, n_rows: tuple[int, int], n_threads: int) -> tuple[float, float]:
    """Seconds a token of attention in all layers, with flash attention and without, for n_rows tokens at a time at the end of a text of
    n_kv, a multiple of 256, in a cache of n_ctx tokens.

    The best of some rounds, by turns; before each of them other memory is read, as weights are, so that the cache lies in RAM. Raises
    MachineLacks when there is no memory for it.
    """
    with ExitStack() as owned:
        graphs = [_Graph(heads, n_ctx, n_kv, rows, n_threads, flash) for rows, flash in zip(n_rows, (True, False), strict=True)]
        for graph in graphs:
            owned.callback(graph.close)
        other, best = np.ones(FLUSHED // 8), [float("inf")] * len(graphs)
        end = time.perf_counter() + SECONDS
        for n in range(MOST_ROUNDS):
            for i, graph in enumerate(graphs):
                other.sum()
                seconds = graph.run()
                best[i] = min(best[i], seconds) if n else best[i]  # the first round touches all memory
            if n >= LEAST_ROUNDS and time.perf_counter() > end:
                break
        with_it, without = (seconds * heads.n_layer / graph.n_layer / graph.n_rows for seconds, graph in zip(best, graphs, strict=True))
        return with_it, without


class _Graph:
    """Owns a ggml context, and a graph in it."""

    def __init__(self, heads: Heads, n_ctx: int, n_kv: int, n_rows: int, n_threads: int, flash: bool) -> None:
        self.n_layer, self.n_rows = min(heads.n_layer, MOST_LAYERS if n_rows == 1 else MOST_LAYERS_READING), n_rows
        dims = heads.k_dim + heads.v_dim
        cache = F16_BYTES * n_ctx * heads.n_head_kv * dims
        rows = 4 * F32_BYTES * n_rows * (heads.n_head + heads.n_head_kv) * dims + I64_BYTES * n_rows * heads.n_head_kv * heads.v_dim
        scores = 0 if flash else 2 * F32_BYTES * heads.n_head * n_kv * n_rows
        n_bytes = self.n_layer * (cache + rows + scores) + F16_BYTES * n_kv * n_rows + SPARE
        self._context = ggml_function("ggml_init", Pointer, [_InitParams])(_InitParams(n_bytes, None, False))
        if not self._context:
            raise MachineLacks(f"ggml has no {n_bytes:,} bytes to measure attention in", "close other programs")
        self._graph = self._call("ggml_new_graph")
        self._mask = self._new(F16, n_kv, n_rows, 1, 1)
        for _ in range(self.n_layer):
            self._add_layer(heads, n_ctx, n_kv, flash)
        self._plan = ggml_function("ggml_graph_plan", _Plan, [Pointer, ctypes.c_int, Pointer])(self._graph, n_threads, None)
        self._work = np.zeros(self._plan.work_size, np.uint8)
        self._plan.work_data = self._work.ctypes.data

    def _call(self, name: str, *arguments: Any) -> Tensor:
        """A function of ggml that takes the context first and gives a tensor. float: a number; int: a length; else a tensor."""
        kinds = [{float: ctypes.c_float, int: ctypes.c_int64}.get(type(value), Pointer) for value in arguments]
        return ggml_function(name, Pointer, [Pointer, *kinds])(self._context, *arguments)

    def _new(self, kind: int, *shape: int) -> Tensor:
        """A tensor of zeros."""
        function = ggml_function(f"ggml_new_tensor_{len(shape)}d", Pointer, [Pointer, ctypes.c_int, *([ctypes.c_int64] * len(shape))])
        return ggml_function("ggml_set_zero", Pointer, [Pointer])(function(self._context, kind, *shape))

    def _permuted(self, tensor: Tensor, *axes: int) -> Tensor:
        return ggml_function("ggml_permute", Pointer, [Pointer, Pointer, *([ctypes.c_int] * 4)])(self._context, tensor, *axes)

    def _part(self, cache: Tensor, shape: tuple[int, int, int], steps: tuple[int, int]) -> Tensor:
        """The tokens of a cache that are looked at, heads outside. steps: f16 numbers from one to the next of the second and third axis."""
        function = ggml_function("ggml_view_3d", Pointer, [Pointer, Pointer, *([ctypes.c_int64] * 3), *([ctypes.c_size_t] * 3)])
        view = function(self._context, cache, *shape, *(F16_BYTES * step for step in steps), 0)
        return self._permuted(view, 0, 2, 1, 3)

    def _add_layer(self, heads: Heads, n_ctx: int, n_kv: int, flash: bool) -> None:
        n_rows = self.n_rows
        k_width, v_width = heads.n_head_kv * heads.k_dim, heads.n_head_kv * heads.v_dim
        k_cache, v_cache = self._new(F16, k_width, n_ctx), self._new(F16, v_width, n_ctx)
        self._store(k_cache, self._new(F32, k_width, n_rows), self._new(I64, n_rows))
        v_new = self._new(F32, v_width, n_rows)
        if flash:
            self._store(v_cache, v_new, self._new(I64, n_rows))
        else:  # each number of a row of V has a place of its own
            places = n_rows * v_width
            scattered = self._call("ggml_reshape_2d", v_cache, 1, v_width * n_ctx)
            self._store(scattered, self._call("ggml_reshape_2d", v_new, 1, places), self._new(I64, places))
        q = self._permuted(self._new(F32, heads.k_dim, heads.n_head, n_rows, 1), 0, 2, 1, 3)
        k = self._part(k_cache, (heads.k_dim, heads.n_head_kv, n_kv), (heads.k_dim, k_width))
        if flash:
            v = self._part(v_cache, (heads.v_dim, heads.n_head_kv, n_kv), (heads.v_dim, v_width))
            self._expand(self._call("ggml_flash_attn_ext", q, k, v, self._mask, 0.1, 0.0, 0.0))
            return
        shares = self._call("ggml_soft_max_ext", self._call("ggml_mul_mat", k, q), self._mask, 0.1, 0.0)
        v = self._part(v_cache, (n_kv, heads.n_head_kv, heads.v_dim), (n_ctx * heads.v_dim, n_ctx))
        mixed = self._permuted(self._call("ggml_mul_mat", v, shares), 0, 2, 1, 3)
        self._expand(self._call("ggml_cont_2d", mixed, heads.n_head * heads.v_dim, n_rows))

    def _store(self, cache: Tensor, rows: Tensor, places: Tensor) -> None:
        self._expand(self._call("ggml_set_rows", cache, rows, places))

    def _expand(self, tensor: Tensor) -> None:
        ggml_function("ggml_build_forward_expand", None, [Pointer, Pointer])(self._graph, tensor)

    def run(self) -> float:
        """Seconds that one round takes."""
        compute = ggml_function("ggml_graph_compute", ctypes.c_int, [Pointer, ctypes.POINTER(_Plan)])
        started = time.perf_counter()
        compute(self._graph, ctypes.byref(self._plan))
        return time.perf_counter() - started

    def close(self) -> None:
        ggml_function("ggml_free", None, [Pointer])(self._context)



def main() -> None:
    """Answers a question of `flows.attention` from standard input: seconds of a token, and of a row of a prompt, each with and without."""
    asked = json.load(sys.stdin)
    heads = Heads(**asked["heads"])

    def seconds(n_kv: int, n_rows: tuple[int, int]) -> tuple[float, float]:
        return attention_seconds(heads, asked["n_ctx"], n_kv, n_rows, asked["n_threads"])

    middle = max(256, asked["n_kv"] // 2 // 256 * 256)  # what the rows of a prompt follow on, in the mean
    rows = tuple(min(middle, n) for n in ROWS)
    sys.stdout.write(json.dumps({"write": seconds(asked["n_kv"], (1, 1)), "read": seconds(middle, (rows[0], rows[1]))}) + "\n")


if __name__ == "__main__":
    main()
