"""How a model is to be loaded and run: what a plan decides and `load` obeys. Values only, no llama_cpp."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

# Names a person may type for a KV cache type. Source: kv_cache_types in llama.cpp common/arg.cpp
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass(frozen=True, slots=True)
class LoadParams:
    """Parameters of a model and its context, in llama.cpp's words.

    cpu_expert_layers: layers whose routed experts stay in RAM; each becomes a tensor buffer override.
    n_ctx: tokens shared by all sequences (kv_unified) or split among them; already a multiple of 256.
    n_outputs_max: rows with logits in one call; llama.cpp aborts when it is below n_seq_max, and speculation needs
    n_seq_max * (1 + n_draft).
    n_draft: tokens that are guessed ahead in each step, by the MTP block where it is loaded, else from the text so far; 0: none. A
    hybrid keeps so many more recurrent states of each sequence.
    checkpoint_bytes: RAM for copies of recurrent states, from which a chat goes on without being read again; 0: none.
    text_bytes: RAM for texts whose slot another request took, so that they need not be read again; 0: none.
    tensor_overrides: (regular expression over tensor names, "CPU"), looked at before cpu_expert_layers; the first match counts.
    tensor_split: shares of the GPUs, in llama.cpp's order; empty: by their free memory.
    reproducible: a sequence is computed alone and always in the same pieces; for equal bits kv_unified must be off, too.
    n_expert_used: experts that the router chooses for a token; 0: as many as the file says.
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
    use_mlock: bool = False
    n_threads: int = 1
    n_threads_batch: int = 1
    checkpoint_bytes: int = 0
    text_bytes: int = 0
    n_draft: int = 0
    tensor_overrides: tuple[tuple[str, str], ...] = ()
    tensor_split: tuple[float, ...] = ()
    n_expert_used: int = 0
    reproducible: bool = False


def params_of(values: dict[str, Any]) -> LoadParams:
    """LoadParams from what JSON made of them, which knows no tuples."""
    return LoadParams(**{field.name: _tuples(values[field.name]) for field in fields(LoadParams) if field.name in values})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
