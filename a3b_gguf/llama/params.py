"""How a model is to be loaded and run: what a plan decides and `load` obeys. Values only, no llama_cpp."""

from __future__ import annotations

from dataclasses import dataclass

# Names a person may type for a KV cache type. Source: kv_cache_types in llama.cpp common/arg.cpp
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass(frozen=True, slots=True)
class LoadParams:
    """Parameters of a model and its context, in llama.cpp's words.

    cpu_expert_layers: layers whose routed experts stay in RAM; each becomes a tensor buffer override.
    n_ctx: tokens shared by all sequences (kv_unified) or split among them; already a multiple of 256.
    n_outputs_max: rows with logits in one call; llama.cpp aborts when it is below n_seq_max.
    """

    n_ctx: int
    n_seq_max: int = 1
    n_batch: int = 512
    n_ubatch: int = 512
    n_outputs_max: int = 1
    n_gpu_layers: int = 0
    cpu_expert_layers: tuple[int, ...] = ()
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    kv_unified: bool = True
    flash_attn: bool = True
    load_mtp: bool = False
    use_mmap: bool = True
    n_threads: int = 1
    n_threads_batch: int = 1
