"""The text part of Qwen3-VL-MoE (30B-A3B): qwen3moe with M-RoPE, its packed experts transposed. Vision is left out.

Porting table: class Qwen3VLMoeTextModel in llama.cpp conversion/qwen3vl.py; shapes as in load_arch_tensors of src/models/qwen3vlmoe.cpp.
"""

from __future__ import annotations

from a3b_convert.archs.base import Arch
from a3b_convert.archs.family import IGNORE, PREFIXES
from a3b_convert.archs.qwen3moe import common_dims, rows
from a3b_convert.config import Config
from a3b_convert.hparams import rope_parameters, text_metadata
from a3b_gguf.metadata import Metadata, u32


def sections(config: Config) -> list[int]:
    """Pairs of columns for time, height, width and nothing; llama.cpp requires them. Raises BadInput when they are absent or too few."""
    pairs = config.count("head_dim") // 2
    found = rope_parameters(config).need("mrope_section", list)
    if len(found) > 4 or not all(isinstance(n, int) and n >= 0 for n in found) or sum(found) != pairs:
        raise config.wrong(f"mrope_section is {found}, expected up to 4 numbers that add up to {pairs} pairs of columns")
    return [*found, 0, 0, 0, 0][:4]


def metadata(config: Config, n_mtp: int, file_type: int) -> Metadata:
    out = text_metadata(config, "qwen3vlmoe", config.count("num_hidden_layers"), file_type, sections(config))
    out["qwen3vlmoe.expert_feed_forward_length"] = u32(config.count("moe_intermediate_size"))
    deepstack = config.section("vision_config").may("deepstack_visual_indexes", list) or []
    out["qwen3vlmoe.n_deepstack_layers"] = u32(len(deepstack))
    return out


ARCH = Arch(
    hf_names=("Qwen3VLMoeForConditionalGeneration",),
    gguf_name="qwen3vlmoe",
    dims=common_dims,
    metadata=metadata,
    rows=rows,
    prefixes=PREFIXES,
    ignore=IGNORE,
)
