"""Loads a model and opens a context on it, as LoadParams say. Both own their memory; close the context first."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp.llama_cpp as C

from a3b_gguf.errors import A3BError, BadInput, MachineLacks, UsageError
from a3b_gguf.llama.buft_overrides import buft_overrides, check_moved, moved_tensors
from a3b_gguf.llama.gate import Gate
from a3b_gguf.llama.log import LlamaLog, LogLine
from a3b_gguf.llama.overrides import expert_overrides
from a3b_gguf.llama.params import KV_TYPES, LoadParams
from a3b_gguf.tensors import TYPES

CONTEXT_TYPE_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP of llama.h
MOST_DRAFTS = 8
LOAD_MODES = {  # (mapped, locked)
    (True, False): C.LLAMA_LOAD_MODE_MMAP,
    (False, False): C.LLAMA_LOAD_MODE_NONE,
    (True, True): C.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, True): C.LLAMA_LOAD_MODE_MLOCK,
}
OUT_OF_MEMORY = re.compile(r"(failed|unable) to allocate|out of memory|insufficient memory|bad_alloc|not enough", re.IGNORECASE)

# (address of the ggml_tensor, asked before computing it or told after, None) -> wanted / go on
EvalCallback = Callable[[int, bool, Any], bool]


class LoadedModel:
    """Owns a llama_model. pointer: for calls of llama_cpp; log: what llama.cpp said while it loaded."""

    def __init__(self, pointer: Any, path: Path, log: tuple[LogLine, ...]) -> None:
        self.pointer, self.path, self.log = pointer, path, log

    @property
    def n_layer(self) -> int:
        """Layers of the trunk, the MTP block not counted."""
        return int(C.llama_model_n_layer(self.pointer))

    @property
    def n_ctx_train(self) -> int:
        return int(C.llama_model_n_ctx_train(self.pointer))

    @property
    def n_moved(self) -> int:
        """Tensors that were put into CPU buffers."""
        return len(moved_tensors(self.log))

    @property
    def n_embd(self) -> int:
        """Width of a hidden row."""
        return int(C.llama_model_n_embd_out(self.pointer))

    @property
    def n_layer_nextn(self) -> int:
        """MTP blocks that the file has, loaded or not."""
        return int(C.llama_model_n_layer_nextn(self.pointer))

    @property
    def is_hybrid(self) -> bool:
        """Whether layers keep a recurrent state, which cannot be cut back to an earlier token."""
        return bool(C.llama_model_is_hybrid(self.pointer) or C.llama_model_is_recurrent(self.pointer))

    def close(self) -> None:
        """Frees the model. Contexts on it must be closed before."""
        if self.pointer:
            C.llama_model_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Context:
    """Owns a llama_context and keeps its callback alive. n_ctx: tokens it really holds, which llama.cpp rounds up."""

    def __init__(self, pointer: Any, model: LoadedModel, callback: Any, log: tuple[LogLine, ...]) -> None:
        self.pointer, self.model, self.log, self._callback = pointer, model, log, callback
        self.memory = C.llama_get_memory(pointer)

    @property
    def n_ctx(self) -> int:
        return int(C.llama_n_ctx(self.pointer))

    @property
    def n_ctx_seq(self) -> int:
        """Tokens that one sequence may hold."""
        return int(C.llama_n_ctx_seq(self.pointer))

    def close(self) -> None:
        if self.pointer:
            C.llama_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def load_model(path: Path, params: LoadParams, vocab_only: bool = False, dry: bool = False) -> LoadedModel:
    """Loads `path` with the experts of `params.cpu_expert_layers` in CPU buffers. vocab_only: no tensors, for tokenizing.

    dry: no tensor is read and nothing is allocated; contexts on it tell their sizes and cannot compute. No GPU is touched when
    n_gpu_layers is 0, nor for a vocabulary.
    Raises BadInput with llama.cpp's own words when it refuses the file, MachineLacks when memory is short or when the experts of
    another set of layers than asked for were moved.
    """
    if not path.is_file():
        raise BadInput(f"{path} is not a file", "give a .gguf file")
    overrides = buft_overrides(LoadParams(n_ctx=0) if vocab_only else params)
    C.llama_backend_init()
    asked = C.llama_model_default_params()
    asked.n_gpu_layers = params.n_gpu_layers
    asked.load_mode = LOAD_MODES[params.use_mmap, params.use_mlock and not vocab_only]
    shares = _shares(params)  # another bare address
    asked.tensor_split = shares
    asked.load_mtp = params.load_mtp
    asked.vocab_only = vocab_only
    asked.no_alloc = dry
    if dry:  # llama.cpp does not map a file that it does not read
        asked.load_mode = LOAD_MODES[False, False]
    metadata = expert_overrides(path, 0 if vocab_only else params.n_expert_used)
    asked.kv_overrides = metadata
    # The field is a bare address: `overrides` must live until the load returns, and does, being a local.
    asked.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    # An empty list of devices: without it a GPU that gets no layer would still be opened, and compute for the CPU.
    no_devices = (ctypes.c_void_p * 1)()
    if vocab_only or params.n_gpu_layers == 0:
        asked.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    with LlamaLog() as log:
        pointer = C.llama_model_load_from_file(str(path).encode(), asked)
        lines, error = log.lines(), log.first_error()
    if not pointer:
        raise _refused(f"llama.cpp cannot load {path}", error)
    model = LoadedModel(pointer, path, lines)
    if not vocab_only:
        try:
            # The MTP block counts as one more layer and is loaded only when asked for.
            n_layers = model.n_layer + (model.n_layer_nextn if params.load_mtp else 0)
            check_moved(moved_tensors(lines), params, n_layers, path)
        except A3BError:
            model.close()
            raise
    return model


def open_context(
    model: LoadedModel, params: LoadParams, eval_callback: EvalCallback | Gate | None = None, mtp: bool = False, pools: bool = False
) -> Context:
    """A context on `model`. eval_callback sees every graph node; asking for a node makes the computation stop after it.

    A Gate lets it see only some calls. mtp: a context of the model's MTP block, which must have been loaded; it has a cache of its own
    and no recurrent state. pools: it gives one vector for a text, in the way that the file names, and no logits.
    A hybrid's context keeps params.n_draft states of each sequence beside the newest, so that drafts can be taken back.
    Raises UsageError for parameters that would abort the process, MachineLacks when memory is short.
    """
    _check_params(params)
    asked = C.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_ubatch = params.n_ctx, params.n_batch, params.n_ubatch
    asked.n_seq_max, asked.kv_unified = params.n_seq_max, params.kv_unified
    asked.n_outputs_max = params.n_seq_max if mtp else params.n_outputs_max
    asked.n_outputs_max_per_seq = max(1, asked.n_outputs_max // params.n_seq_max)
    asked.ctx_type = CONTEXT_TYPE_MTP if mtp else 0
    asked.embeddings = pools
    asked.n_rs_seq = params.n_draft if model.is_hybrid and not mtp else 0
    asked.n_threads, asked.n_threads_batch = params.n_threads, params.n_threads_batch
    asked.type_k, asked.type_v = TYPES[params.kv_type_k].number, TYPES[params.kv_type_v].number
    asked.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED if params.flash_attn else C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if isinstance(eval_callback, Gate):
        callback = C.ggml_backend_sched_eval_callback(eval_callback.address)
        asked.cb_eval_user_data = eval_callback.user_data
    else:
        callback = C.ggml_backend_sched_eval_callback() if eval_callback is None else C.ggml_backend_sched_eval_callback(eval_callback)
    asked.cb_eval = callback
    with LlamaLog() as log:
        pointer = C.llama_init_from_model(model.pointer, asked)
        lines, error = log.lines(), log.first_error()
    if not pointer:
        raise _refused(f"llama.cpp cannot open a context of {params.n_ctx:,} tokens on {model.path}", error)
    return Context(pointer, model, callback, lines)


def _shares(params: LoadParams) -> ctypes.Array[ctypes.c_float]:
    """tensor_split as C wants it: one share for every device that llama.cpp could have. All zeros: by free memory."""
    most = int(C.llama_max_devices())
    if len(params.tensor_split) > most:
        raise UsageError(f"{len(params.tensor_split)} shares of GPUs, llama.cpp knows {most} devices at most")
    return (ctypes.c_float * most)(*params.tensor_split)


def _check_params(params: LoadParams) -> None:
    """What llama.cpp answers with an abort of the whole process, or with words that nobody understands."""
    for kind in (params.kv_type_k, params.kv_type_v):
        if kind not in KV_TYPES:
            raise UsageError(f"there is no KV cache type {kind!r}", f"known: {', '.join(KV_TYPES)}")
    if not 0 <= params.n_draft <= MOST_DRAFTS:
        raise UsageError(f"{params.n_draft} tokens cannot be drafted", f"0 to {MOST_DRAFTS}")
    rows = params.n_seq_max * (1 + params.n_draft)
    if params.n_outputs_max < rows:
        each = f"with {params.n_draft} drafts each "
        raise UsageError(f"n_outputs_max is {params.n_outputs_max}, less than the {params.n_seq_max} sequences {each}need")
    if params.n_ubatch < rows or params.n_ubatch < params.n_draft + 2:
        raise UsageError(f"n_ubatch is {params.n_ubatch}, less than a row of each of {params.n_seq_max} sequences and its drafts need")
    if params.n_ubatch > params.n_batch:
        raise UsageError(f"n_ubatch is {params.n_ubatch}, more than n_batch, which is {params.n_batch}")
    if not params.flash_attn and not TYPES[params.kv_type_v].is_float:
        raise UsageError(f"V cache type {params.kv_type_v} needs flash attention", "leave flash attention on, or choose f16")


def _refused(what: str, error: str) -> A3BError:
    """llama.cpp answers every failure with NULL; what went wrong is in its log alone."""
    message = f"{what}: {error or 'it gives no reason'}"
    if OUT_OF_MEMORY.search(error):
        return MachineLacks(message, "ask for less context, fewer slots or a smaller type; `a3b plan` shows what takes the memory")
    return BadInput(message, "check the file with `a3b inspect`")
