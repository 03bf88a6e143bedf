"""Loads a model and opens a context on it, as LoadParams say. Both own their memory; close the context first."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp.llama_cpp as C

from a3b_gguf.errors import A3BError, BadInput, MachineLacks, UsageError
from a3b_gguf.llama.log import LlamaLog, LogLine
from a3b_gguf.llama.params import KV_TYPES, LoadParams
from a3b_gguf.llama.symbols import ggml_function
from a3b_gguf.tensors import TYPES

# What --n-cpu-moe of llama.cpp matches. Source: LLM_FFN_EXPS_REGEX in llama.cpp common/common.h
EXPERT_PATTERN = r"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps"
OVERRIDDEN = re.compile(r"tensor blk\.(\d+)\.\S+ .* buffer type overridden to ")
OUT_OF_MEMORY = re.compile(r"(failed|unable) to allocate|out of memory|insufficient memory|bad_alloc|not enough", re.IGNORECASE)

# (address of the ggml_tensor, asked before computing it or told after, None) -> wanted / go on
EvalCallback = Callable[[int, bool, Any], bool]


class BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h, which llama_cpp does not bind."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


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
        """Expert tensors that were put into CPU buffers."""
        return sum(1 for line in self.log if OVERRIDDEN.match(line.text))

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


def load_model(path: Path, params: LoadParams, vocab_only: bool = False) -> LoadedModel:
    """Loads `path` with the experts of `params.cpu_expert_layers` in CPU buffers. vocab_only: no tensors, for tokenizing.

    No GPU is touched when n_gpu_layers is 0, nor for a vocabulary.
    Raises BadInput with llama.cpp's own words when it refuses the file, MachineLacks when memory is short or when the experts of
    another set of layers than asked for were moved.
    """
    if not path.is_file():
        raise BadInput(f"{path} is not a file", "give a .gguf file")
    overrides = _expert_overrides(() if vocab_only else params.cpu_expert_layers)
    C.llama_backend_init()
    asked = C.llama_model_default_params()
    asked.n_gpu_layers = params.n_gpu_layers
    asked.load_mode = C.LLAMA_LOAD_MODE_MMAP if params.use_mmap else C.LLAMA_LOAD_MODE_NONE
    asked.load_mtp = params.load_mtp
    asked.vocab_only = vocab_only
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
            _check_overrides(model, params)
        except A3BError:
            model.close()
            raise
    return model


def open_context(model: LoadedModel, params: LoadParams, eval_callback: EvalCallback | None = None) -> Context:
    """A context on `model`. eval_callback sees every graph node; asking for a node makes the computation stop after it.

    Raises UsageError for parameters that would abort the process, MachineLacks when memory is short.
    """
    _check_params(params)
    asked = C.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_ubatch = params.n_ctx, params.n_batch, params.n_ubatch
    asked.n_seq_max, asked.kv_unified = params.n_seq_max, params.kv_unified
    asked.n_outputs_max = params.n_outputs_max
    asked.n_outputs_max_per_seq = max(1, params.n_outputs_max // params.n_seq_max)
    asked.n_threads, asked.n_threads_batch = params.n_threads, params.n_threads_batch
    asked.type_k, asked.type_v = TYPES[params.kv_type_k].number, TYPES[params.kv_type_v].number
    asked.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED if params.flash_attn else C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    callback = C.ggml_backend_sched_eval_callback() if eval_callback is None else C.ggml_backend_sched_eval_callback(eval_callback)
    asked.cb_eval = callback
    with LlamaLog() as log:
        pointer = C.llama_init_from_model(model.pointer, asked)
        lines, error = log.lines(), log.first_error()
    if not pointer:
        raise _refused(f"llama.cpp cannot open a context of {params.n_ctx:,} tokens on {model.path}", error)
    return Context(pointer, model, callback, lines)


def _expert_overrides(layers: Sequence[int]) -> ctypes.Array[BuftOverride]:
    """One entry a layer and a zeroed last one, where the loader stops. The array owns its patterns, nobody else owns the array."""
    array = (BuftOverride * (len(layers) + 1))()
    if layers:
        cpu = ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p, [])()
        for entry, layer in zip(array, layers, strict=False):
            entry.pattern, entry.buft = (EXPERT_PATTERN % layer).encode(), cpu
    return array


def _check_overrides(model: LoadedModel, params: LoadParams) -> None:
    """llama.cpp names each tensor that it moved; these lines are the only proof that a placement took effect.

    A layer has 3 expert tensors (gate, up, down), or 2 where gate and up are one.
    """
    # The MTP block counts as one more layer and is loaded only when asked for.
    n_layers = model.n_layer + (int(C.llama_model_n_layer_nextn(model.pointer)) if params.load_mtp else 0)
    asked = {layer for layer in params.cpu_expert_layers if layer < n_layers}
    moved = Counter(int(match[1]) for line in model.log if (match := OVERRIDDEN.match(line.text)))
    if set(moved) != asked or not set(moved.values()) <= {2, 3}:
        raise MachineLacks(
            f"{model.path}: the experts of layers {sorted(asked)} should be in RAM, "
            f"llama.cpp moved {dict(sorted(moved.items()))} (layer: tensors)",
            "the model has no routed experts there, or the installed llama-cpp-python is not the pinned one",
        )


def _check_params(params: LoadParams) -> None:
    """What llama.cpp answers with an abort of the whole process, or with words that nobody understands."""
    for kind in (params.kv_type_k, params.kv_type_v):
        if kind not in KV_TYPES:
            raise UsageError(f"there is no KV cache type {kind!r}", f"known: {', '.join(KV_TYPES)}")
    if params.n_outputs_max < params.n_seq_max:
        raise UsageError(f"n_outputs_max is {params.n_outputs_max}, less than the {params.n_seq_max} sequences")
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
