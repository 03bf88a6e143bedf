"""Checkpoints whose weights are quantized already, and adapters: refused by name, with what to do, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_convert import convert, prepare
from a3b_gguf.errors import BadInput
from tiny import Form, Sizes, in_form, save, weights, write_checkpoint

SMALL, PLAIN = Sizes(n_layer=1), Form(mtp=False)
A_PROJ = "model.layers.0.linear_attn.in_proj_a"
NVFP4_GROUPS = {"group_0": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}}


def refusal(folder: Path) -> BadInput:
    with pytest.raises(BadInput) as caught:
        convert(folder, folder.parent / "x.gguf")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert str(folder) in caught.value.message
    return caught.value


def described(folder: Path, quantization: dict[str, Any], key: str = "quantization_config") -> Path:
    write_checkpoint(folder, PLAIN, SMALL, edit=lambda values, found: found.update({key: quantization}))
    return folder


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt, NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt, FP8"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": NVFP4_GROUPS},
            "compressed-tensors, nvfp4",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors, pack-quantized"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ, 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "AWQ, 4 bits"),
        ({"quant_method": "auto-round", "bits": 4}, "AutoRound, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "fbgemm_fp8"}, "FP8 of FBGEMM"),
        ({"quant_method": "next-year", "bits": 3}, "the scheme 'next-year', 3 bits"),
        ({"bits": 4, "group_size": 64}, "MLX, 4 bits"),
        ({"something": "else"}, "the scheme 'unknown'"),
        ({"quant_method": ["fp8"]}, """the scheme "['fp8']\""""),
    ],
)
def test_schemes_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], said: str) -> None:
    error = refusal(described(tmp_path / "tiny", quantization))
    assert f"key quantization_config says that the weights are quantized with {said}" in error.message
    assert "bf16 checkpoint" in error.hint


def test_an_old_name_of_the_key_counts(tmp_path: Path) -> None:
    folder = described(tmp_path / "tiny", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compression_config")
    assert "compressed-tensors, pack-quantized" in refusal(folder).message
    assert "MLX, 4 bits" in refusal(described(folder, {"bits": 4, "group_size": 64}, "quantization")).message


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "quantized with NVFP4"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "quantized with GPTQ, 4 bits"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "quantized with AWQ, 4 bits"),
    ],
)
def test_schemes_that_only_another_file_tells_of(tmp_path: Path, file: str, value: dict[str, Any], said: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    (folder / file).write_text(json.dumps(value))
    error = refusal(folder)
    assert said in error.message
    assert file in error.message


def without_config(folder: Path, parts: dict[str, np.ndarray], dtypes: dict[str, str]) -> Path:
    """A checkpoint whose config.json says nothing, with in_proj_a stored as `parts`."""
    write_checkpoint(folder, PLAIN, SMALL)
    values = in_form(weights(SMALL, mtp=False), PLAIN)
    del values[A_PROJ + ".weight"]
    save(folder / "model.safetensors", {**values, **{A_PROJ + end: value for end, value in parts.items()}}, others=dtypes)
    return folder


BYTES = np.zeros((4, 32), np.float32)
ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({".weight": np.zeros((128, 1), np.float32), ".weight.absmax": ONE, ".weight.quant_map": ONE}, "bitsandbytes"),
        ({".weight": np.zeros((128, 1), np.float32)}, f"tensor {A_PROJ}.weight belongs to .*bitsandbytes, 4 bits"),
        ({".weight": BYTES, ".SCB": ONE}, f"tensor {A_PROJ}.SCB belongs to .*bitsandbytes"),
        ({".weight": BYTES, ".weight_scale": BYTES, ".weight_scale_2": ONE, ".input_scale": ONE}, "NVFP4|FP8 or compressed-tensors"),
        ({".weight_packed": BYTES, ".weight_scale": BYTES, ".weight_global_scale": ONE}, "compressed-tensors|NVFP4"),
        ({".qweight": BYTES, ".qzeros": BYTES, ".scales": BYTES, ".g_idx": ONE}, "GPTQ"),
        ({".weight_scale_inv": ONE, ".weight": BYTES}, "FP8"),
        ({".weight": BYTES, ".scales": BYTES, ".biases": BYTES}, "GPTQ, AWQ or MLX"),
    ],
)
def test_tensors_tell_of_schemes_that_the_config_lost(tmp_path: Path, parts: dict[str, np.ndarray], said: str) -> None:
    dtypes = dict.fromkeys((A_PROJ + ".weight", A_PROJ + ".weight_packed", A_PROJ + ".qweight"), "U8")
    with pytest.raises(BadInput, match=said) as caught:
        prepare(without_config(tmp_path / "tiny", parts, dtypes))
    assert "quantized already" in caught.value.message
    assert "bf16 checkpoint" in caught.value.hint


def test_r7_bitsandbytes_is_one_error_before_writing(tmp_path: Path) -> None:
    parts = {".weight": np.zeros((128, 1), np.float32), ".weight.absmax": ONE, ".weight.quant_state.bitsandbytes__nf4": ONE}
    error = refusal(without_config(tmp_path / "tiny", parts, {A_PROJ + ".weight": "U8"}))
    assert "bitsandbytes" in error.message


def test_r10_modelopt_nvfp4_is_refused_and_no_scale_is_dropped(tmp_path: Path) -> None:
    parts = {".weight": BYTES, ".weight_scale": np.ones((4, 4), np.float32), ".weight_scale_2": ONE, ".input_scale": ONE}
    folder = without_config(tmp_path / "tiny", parts, {A_PROJ + ".weight": "U8"})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert "quantized with NVFP4" in refusal(folder).message


def test_r11_compressed_tensors_nvfp4_is_refused(tmp_path: Path) -> None:
    groups = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": NVFP4_GROUPS}
    assert "compressed-tensors, mixed-precision" in refusal(described(tmp_path / "tiny", groups)).message


def test_a_lora_adapter_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3.6-35B-A3B"}))
    save(folder / "adapter_model.safetensors", {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 4), np.float32)})
    error = refusal(folder)
    assert f"{folder} is a LoRA adapter for Qwen/Qwen3.6-35B-A3B (adapter_config.json), no model" in error.message
    assert "merge" in error.hint
    write_checkpoint(folder, PLAIN, SMALL)
    assert prepare(folder).tensors, "a merged model may keep the adapter's configuration"
