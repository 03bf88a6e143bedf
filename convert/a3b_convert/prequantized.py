"""Which scheme a checkpoint's weights are quantized with: FP8 with scales is read (scaled.py), every other one refused by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3b_convert.config import Config, read_json
from a3b_convert.safetensors_file import SafeTensor
from a3b_gguf.errors import BadInput

# quant_method (or quant_algo) in config.json -> what people call it
SCHEMES = {
    "fp8": "FP8", "fbgemm_fp8": "FP8 of FBGEMM", "compressed-tensors": "compressed-tensors", "modelopt": "ModelOpt", "nvfp4": "NVFP4",
    "bitsandbytes": "bitsandbytes", "awq": "AWQ", "gptq": "GPTQ", "auto-round": "AutoRound", "mxfp4": "MXFP4", "hqq": "HQQ",
    "quanto": "Quanto", "torchao": "torchao", "bitnet": "BitNet", "aqlm": "AQLM", "eetq": "EETQ", "higgs": "HIGGS", "vptq": "VPTQ",
    "exl2": "EXL2", "exl3": "EXL3", "mlx": "MLX",
}  # fmt: skip
# end of a tensor's name -> the scheme that writes such tensors
TELLTALES = {
    ".weight_scale_inv": "FP8", "_proj_scale_inv": "FP8", ".weight_scale_2": "NVFP4", ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors", ".weight_global_scale": "NVFP4", ".qweight": "GPTQ or AWQ", ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ", ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes", ".SCB": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes", ".quant_state.bitsandbytes__fp4": "bitsandbytes", "_blocks": "MXFP4",
    ".scales": "GPTQ, AWQ or MLX", ".trellis": "EXL3", ".q_weight": "EXL2", ".bitmask": "compressed-tensors, sparse",
}  # fmt: skip
# those of them that belong to FP8 where config.json says so
OF_FP8 = (".weight_scale_inv", "_proj_scale_inv", ".weight_scale")
# key of a description without a name -> the scheme whose tool writes it
SIGNS = {"desc_act": "gptq", "w_bit": "awq", "group_size": "mlx"}
# where schemes are described besides config.json -> the key that holds the description, "" for the whole file
OTHER_FILES = {"hf_quant_config.json": "quantization", "quantize_config.json": "", "quant_config.json": ""}
BF16_CHECKPOINT = "convert the model's bf16 checkpoint, then use a3b quantize"


@dataclass(frozen=True, slots=True)
class Scheme:
    """FP8 as it is read. name: in messages. block: rows and columns of a block with one scale; None: one for a row or a tensor."""

    name: str
    block: tuple[int, int] | None


def scheme_of(config: Config, tensors: Mapping[str, SafeTensor]) -> Scheme | None:
    """The scheme that config.json or the tensors' names tell of, None for weights that are plain numbers.

    Raises BadInput that names a scheme that is not read.
    """
    path, found = _description(config)
    if found is None:
        _refuse_telltales(config.path.parent, tensors, ())
        return None
    scheme = _fp8(path, found)
    _refuse_telltales(config.path.parent, tensors, OF_FP8)
    return scheme


def refuse_adapter(folder: Path) -> None:
    """Raises BadInput for a LoRA adapter, which holds differences to a model and no model."""
    if (folder / "adapter_config.json").is_file() and not any(folder.glob("model*.safetensors")):
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise BadInput(
            f"{folder} is a LoRA adapter{f' for {base}' if base else ''} (adapter_config.json), no model",
            "merge it into its base model first (merge_and_unload of PEFT), save that, and convert the result",
        )


def _description(config: Config) -> tuple[Path, dict[str, Any] | None]:
    """What says how the weights are quantized, and the file that it stands in."""
    for section in (config.values, config.root):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(section.get(key), dict) and section[key]:
                return config.path, section[key]
    for name, key in OTHER_FILES.items():
        path = config.path.with_name(name)
        if path.is_file():
            whole = read_json(path)
            value: Any = whole.get(key) if key else whole
            if isinstance(value, dict) and any(value.get(k) for k in ("quant_method", "quant_algo", "bits", "w_bit")):
                return path, value
    return config.path, None


def _refuse_telltales(folder: Path, tensors: Mapping[str, SafeTensor], allowed: Iterable[str]) -> None:
    ends = {end: scheme for end, scheme in TELLTALES.items() if end not in allowed}
    for name, tensor in tensors.items():
        scheme = next((scheme for end, scheme in ends.items() if name.endswith(end)), None)
        if scheme is None and name.endswith(".weight") and tensor.dtype == "U8" and tensor.shape[1:] == (1,):
            scheme = "bitsandbytes, 4 bits"  # two weights a byte, in one long column
        if scheme:
            raise BadInput(
                f"{folder}: tensor {name} belongs to weights that are quantized already ({scheme}): not converted", BF16_CHECKPOINT
            )


def _fp8(path: Path, found: dict[str, Any]) -> Scheme:
    """The scheme of quantization_config, when it is FP8 of the two kinds that are read."""
    if found.get("quant_method") == "fp8":
        if found.get("fmt") not in (None, "e4m3"):
            raise _refused(path, found, f", fmt {found['fmt']!r}")
        return Scheme("FP8", _block(path, found, found.get("weight_block_size")))
    if found.get("quant_method") == "compressed-tensors" and found.get("format") == "float-quantized":
        return Scheme("compressed-tensors FP8", _block_of_groups(path, found))
    raise _refused(path, found)


def _block_of_groups(path: Path, found: dict[str, Any]) -> tuple[int, int] | None:
    """The one block size of all config_groups of compressed-tensors."""
    groups = found.get("config_groups")
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()] if isinstance(groups, dict) else []
    blocks = set()
    for entry in weights:
        if not isinstance(entry, dict) or entry.get("type") != "float" or entry.get("num_bits") != 8:
            raise _refused(path, found, f", weights {entry}")
        if entry.get("strategy") not in ("tensor", "channel", "block"):
            raise _refused(path, found, f", strategy {entry.get('strategy')}")
        if (entry["strategy"] == "block") != (entry.get("block_structure") is not None):
            raise _refused(path, found, f", strategy {entry['strategy']} with block_structure {entry.get('block_structure')}")
        blocks.add(_block(path, found, entry.get("block_structure")))
    if len(blocks) != 1:
        raise _refused(path, found, f", {len(blocks)} block sizes in config_groups")
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise _refused(path, found, f", sparse ({sparsity['format']})")
    if found.get("transform_config"):
        raise _refused(path, found, ", rotated (transform_config)")
    return blocks.pop()


def _block(path: Path, found: dict[str, Any], value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in value):
        return value[0], value[1]
    raise _refused(path, found, f", blocks of {value!r}")


def _unnamed(found: dict[str, Any]) -> str:
    """The scheme of a description that does not name it, by a key that only its tool writes."""
    return next((scheme for key, scheme in SIGNS.items() if key in found), "unknown")


def _refused(path: Path, found: dict[str, Any], more: str = "") -> BadInput:
    method = str(found.get("quant_method") or found.get("quant_algo") or _unnamed(found)).lower()
    details = [f"{found[key]} bits" for key in ("bits", "w_bit") if isinstance(found.get(key), int)]
    details += [f"{bits} bits" for bits in (4, 8) if found.get(f"load_in_{bits}bit")]
    details += [str(found[key]) for key in ("format", "quant_algo") if found.get(key) and str(found[key]).lower() != method]
    name = SCHEMES.get(method, f"the scheme {method!r}")
    key = "key quantization_config" if path.name == "config.json" else "it"
    return BadInput(
        f"{path}: {key} says that the weights are quantized with {', '.join([name, *details])}{more}: not converted", BF16_CHECKPOINT
    )
