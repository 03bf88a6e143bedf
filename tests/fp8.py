"""The checkpoints of tests/tiny.py as FP8 with scales, in the forms in which they are published."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from tiny import DTYPES, Form, Sizes, in_form, weights, write_checkpoint

KEPT = ("mlp.gate.weight", "conv1d.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight", "mtp.fc.weight")
WHOLE = Sizes()
ROOT_TENSORS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class FP8:
    """How the scales are laid out. ending: of a scale's name behind the weight's. strategy: block, channel or tensor.

    activations: how scales of activations are called, if there are any.
    """

    method: str = "fp8"
    strategy: str = "block"
    block: tuple[int, int] = (24, 20)  # no width of tests/tiny.py is a multiple: every last block is partial
    scale_dtype: str = "F32"
    activations: str = ""

    @property
    def ending(self) -> str:
        return "_scale_inv" if self.method == "fp8" else "_scale"

    def config(self) -> dict[str, Any]:
        """quantization_config of config.json."""
        if self.method == "fp8":
            block = {"weight_block_size": list(self.block)} if self.strategy == "block" else {}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if self.activations else "dynamic", **block}
        structure = list(self.block) if self.strategy == "block" else None
        inner = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": self.strategy, "block_structure": structure}
        groups = {"group_0": {"targets": ["Linear"], "weights": inner}}
        return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "ignore": ["lm_head"]}


def write_fp8(folder: Path, fp8: FP8, form: Form, sizes: Sizes = WHOLE) -> Path:
    """A checkpoint whose linear weights are FP8; the others stay bf16."""
    write_checkpoint(folder, form, sizes)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = fp8.config()
    (folder / "config.json").write_text(json.dumps(config))
    save_fp8(folder / "model.safetensors", stored(fp8, form, sizes))
    return folder


Stored = dict[str, tuple[str, NDArray[Any]]]  # dtype of DTYPES or F8_E4M3, and the stored elements


def stored(fp8: FP8, form: Form, sizes: Sizes) -> Stored:
    """Every tensor as it is stored: codes and scales for linear weights."""
    out: Stored = {}
    for name, value in in_form(weights(sizes, mtp=form.mtp, arch=form.arch), form).items():
        if value.ndim < 2 or name.endswith(KEPT + ROOT_TENSORS):
            out[name] = ("BF16", DTYPES["BF16"][1](value))
            continue
        scale = scales(fp8, value)
        out[name] = ("F8_E4M3", nearest_code(value / spread(fp8, scale, value.shape)))
        out[name + fp8.ending] = (fp8.scale_dtype, DTYPES[fp8.scale_dtype][1](scale))
        if fp8.activations:
            out[f"{name.removesuffix('.weight')}.{fp8.activations}"] = ("F32", np.ones(1, np.float32))
    return out


def scales(fp8: FP8, value: NDArray[np.float32]) -> NDArray[np.float32]:
    """Random scales, so that each is another, in the shape that the strategy has."""
    *lead, rows, cols = value.shape
    shape = {
        "block": (*lead, -(-rows // fp8.block[0]), -(-cols // fp8.block[1])),
        "channel": (*lead, rows, 1),
        "tensor": (*lead, 1, 1) if lead else (1,),
    }[fp8.strategy]
    drawn = np.random.default_rng([rows, cols]).uniform(0.001, 0.003, shape).astype(np.float32)
    return drawn if fp8.scale_dtype == "F32" else (drawn.view(np.uint32) & 0xFFFF0000).view(np.float32)


def spread(fp8: FP8, scale: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The scale of every weight."""
    if fp8.strategy != "block":
        return np.broadcast_to(scale, shape)
    for axis, size in zip((-2, -1), fp8.block, strict=True):
        scale = scale.repeat(size, axis)
    return scale[..., : shape[-2], : shape[-1]]


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E4M3 one code at a time, by the specification's formula."""

    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa / 512 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        return float("nan") if code & 127 == 127 else -size if code & 128 else size

    return np.array([value(code) for code in range(256)], np.float32)[codes]


def nearest_code(value: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Some code near each value; which one of two equally near does not matter here."""
    positive = decode(np.arange(127, dtype=np.uint8))
    code = np.searchsorted(positive, np.abs(value)).clip(0, 126)
    return (code | np.where(value < 0, 128, 0)).astype(np.uint8)


def save_fp8(path: Path, tensors: Stored) -> None:
    names = {"F8_E4M3": "float8_e4m3fn"}
    arrays = {name: np.asarray(array, order="C") for name, (_, array) in tensors.items()}
    spec = {
        name: TensorSpec(
            dtype=names.get(kind) or DTYPES[kind][0],
            shape=arrays[name].shape,
            data_ptr=arrays[name].ctypes.data,
            data_len=arrays[name].nbytes,
        )
        for name, (kind, _) in tensors.items()
    }
    serialize_file(spec, path, {"format": "pt"})


# name -> what llama.cpp's own converter was run on; it reads compressed-tensors per channel or per block only
GOLDEN_FORMS: dict[str, tuple[FP8, Form]] = {
    "fp8 blocks, per expert": (FP8(activations="activation_scale"), Form(packed=False, mtp_packed=False)),
    "fp8 blocks, packed": (FP8(), Form()),
    "fp8 blocks, bf16 scales": (FP8(scale_dtype="BF16"), Form(packed=False, mtp=False)),
    "fp8 tensor": (FP8(strategy="tensor"), Form(packed=False, mtp=False)),
    "compressed-tensors channel": (FP8("compressed-tensors", "channel"), Form(packed=False, mtp=False, nested=True)),
    "fp8 blocks, qwen3moe": (FP8(), Form(arch="qwen3moe", packed=False, mtp=False)),
    "fp8 blocks, qwen3next": (FP8(), Form(arch="qwen3next", packed=False, mtp=False)),
    "compressed-tensors blocks": (FP8("compressed-tensors", "block"), Form(packed=False, mtp=False)),
}
