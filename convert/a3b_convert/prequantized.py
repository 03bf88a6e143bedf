"""Refuses checkpoints whose weights are quantized already, by the name of the scheme, before anything else is looked at.

A scheme that becomes readable leaves both tables, and its tensors get a reader with the two members that placement needs of
`SafeTensor`: `type` and `read`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from a3b_convert.config import Config
from a3b_gguf.errors import BadInput

# quant_method (or quant_algo) in config.json -> what people call it
SCHEMES = {
    "fp8": "FP8", "fbgemm_fp8": "FP8", "compressed-tensors": "compressed-tensors", "modelopt": "NVFP4 or FP8 of ModelOpt",
    "nvfp4": "NVFP4", "bitsandbytes": "bitsandbytes", "awq": "AWQ", "gptq": "GPTQ", "auto-round": "AutoRound", "mxfp4": "MXFP4",
    "hqq": "HQQ", "quanto": "Quanto", "torchao": "torchao", "bitnet": "BitNet",
}  # fmt: skip
# end of a tensor's name -> the scheme that writes such tensors
TELLTALES = {
    ".weight_scale_inv": "FP8", ".weight_scale_2": "NVFP4", ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors", ".weight_global_scale": "NVFP4", ".qweight": "GPTQ or AWQ", ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ", ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes", ".SCB": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes", ".quant_state.bitsandbytes__fp4": "bitsandbytes", "_blocks": "MXFP4",
}  # fmt: skip
HINT = "convert the model's bf16 checkpoint, then use a3b quantize"


def refuse_prequantized(config: Config, names: Iterable[str]) -> None:
    """Raises BadInput that names the scheme when config.json or the tensors' names tell of one."""
    for section in (config.values, config.root):
        found = section.get("quantization_config")
        if isinstance(found, dict):
            raise BadInput(f"{config.path}: key quantization_config says that the weights are {_scheme(found)}: not converted", HINT)
    for name in names:
        scheme = next((scheme for end, scheme in TELLTALES.items() if name.endswith(end)), None)
        if scheme:
            raise BadInput(
                f"{config.path.parent}: tensor {name} belongs to weights that are quantized already ({scheme}): not converted", HINT
            )


def _scheme(found: dict[str, Any]) -> str:
    method = str(found.get("quant_method") or found.get("quant_algo") or "unknown").lower()
    bits = next((f", {found[key]} bits" for key in ("bits", "w_bit") if isinstance(found.get(key), int)), "")
    if found.get("load_in_4bit"):
        bits = ", 4 bits"
    if found.get("format"):
        bits += f", {found['format']}"
    return f"quantized with {SCHEMES.get(method, f'the scheme {method!r}')}{bits}"
