"""Which tensors stay in RAM: patterns that llama.cpp's loader obeys, and the proof that it did."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Sequence

from a3b_gguf.errors import MachineLacks, UsageError
from a3b_gguf.llama.log import LogLine
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.symbols import ggml_function

# What --n-cpu-moe of llama.cpp matches. Source: LLM_FFN_EXPS_REGEX in llama.cpp common/common.h
EXPERT_PATTERN = r"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps"
EXPERT_NAME = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch|)exps")
OVERRIDDEN = re.compile(r"tensor (\S+) .* buffer type overridden to ")


class BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h, which llama_cpp does not bind."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def buft_overrides(params: LoadParams) -> ctypes.Array[BuftOverride]:
    """One entry a pattern and a zeroed last one, where the loader stops. The array owns its patterns, nobody else owns the array.

    Raises UsageError for another place than the CPU.
    """
    for pattern, place in params.tensor_overrides:
        if place != "CPU":
            raise UsageError(f"tensors {pattern!r} cannot be put on {place!r}", "the only place that a tensor can be told is CPU")
    patterns = [*(pattern for pattern, _ in params.tensor_overrides), *(EXPERT_PATTERN % layer for layer in params.cpu_expert_layers)]
    array = (BuftOverride * (len(patterns) + 1))()
    if patterns:
        cpu = ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p, [])()
        for entry, pattern in zip(array, patterns, strict=False):
            entry.pattern, entry.buft = pattern.encode(), cpu
    return array


def moved_tensors(log: Sequence[LogLine]) -> tuple[str, ...]:
    """Names of the tensors that llama.cpp says it put elsewhere."""
    return tuple(match[1] for line in log if (match := OVERRIDDEN.match(line.text)))


def check_moved(moved: Sequence[str], params: LoadParams, n_layers: int, path: object) -> None:
    """llama.cpp names each tensor that it moved; these lines are the only proof that a placement took effect.

    A layer has 3 expert tensors (gate, up, down), or 2 where gate and up are one. n_layers: layers that were loaded. Raises MachineLacks.
    """
    asked = {layer for layer in params.cpu_expert_layers if layer < n_layers}
    singly = [pattern for pattern, _ in params.tensor_overrides]
    for pattern in singly:
        if not any(re.search(pattern, name) for name in moved):
            raise MachineLacks(f"{path}: no tensor was moved by {pattern!r}", "the model has no tensor of such a name")
    rest = [name for name in moved if not any(re.search(pattern, name) for pattern in singly)]
    layers = Counter(int(match[1]) for name in rest if (match := EXPERT_NAME.match(name)))
    wrong = [name for name in rest if not EXPERT_NAME.match(name)]
    known = {int(match[1]) for name in moved if (match := EXPERT_NAME.match(name))}
    short = [layer for layer in asked - set(layers) if layer not in known]
    if wrong or short or not set(layers) <= asked or not (singly or set(layers.values()) <= {2, 3}):
        raise MachineLacks(
            f"{path}: the experts of layers {sorted(asked)} should be in RAM, "
            f"llama.cpp moved {dict(sorted(layers.items()))} (layer: tensors)",
            "the model has no routed experts there, or the installed llama-cpp-python is not the pinned one",
        )
