"""What a context keeps from token to token: KV cache, recurrent states, checkpoints of them, texts without a slot, logits."""

from __future__ import annotations

from collections import defaultdict

from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.term import Term
from a3b_gguf.tensors import TYPES

F32 = 4
CHECKPOINTS_OF_A_TEXT = 4  # that the engine keeps with it; see a3b_server.saved_texts
# Vulkan's attention reads caches of any type as they are (flash_attn shaders in ggml/src/ggml-vulkan); Metal has room for an f16 copy
# whatever the type is (ggml_metal_op_flash_attn_ext_extra_kv_f16 in ggml/src/ggml-metal/ggml-metal-ops.cpp). All others do as CUDA does.
READ_ALL_TYPES, ALWAYS_COPY = ("Vulkan",), ("MTL",)


def kv_cache(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """n_ctx rows of K and of V in each attention layer, on the layer's device.

    Source: llama_kv_cache::llama_kv_cache in src/llama-kv-cache.cpp, hybrid layers by the filter in llama_model::create_memory.
    """
    found: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.layers):
        found[placement.layers[i]] += kv_row_bytes(facts, layer.n_head_kv, settings) * settings.n_ctx
    return [Term("KV cache", device, n_bytes) for device, n_bytes in found.items()]


def kv_row_bytes(facts: Facts, n_head_kv: int, settings: Settings) -> int:
    """Bytes of one token in one layer. A quantized type needs whole blocks, which `planner.rules` checks by head size."""
    k, v = TYPES[settings.kv_type_k], TYPES[settings.kv_type_v]
    return (n_head_kv * facts.k_dim * k.block_bytes) // k.block + (n_head_kv * facts.v_dim * v.block_bytes) // v.block


def recurrent_state(facts: Facts, placement: Placement, settings: Settings) -> list[Term]:
    """Convolution and DeltaNet states in f32, one of each for every kept state and recurrent layer; no context length in it.

    Source: llama_memory_recurrent in src/llama-memory-recurrent.cpp (n_seq_max * (1 + n_rs_seq) cells), n_embd_r and n_embd_s in
    src/llama-hparams.cpp.
    """
    found: dict[str, int] = defaultdict(int)
    for i, layer in enumerate(facts.layers):
        if layer.recurrent:
            found[placement.layers[i]] += F32 * (facts.conv_state + facts.ssm_state) * settings.n_states
    return [Term("recurrent state", device, n_bytes) for device, n_bytes in found.items()]


def checkpoints(facts: Facts, settings: Settings) -> Term:
    """Copies of recurrent states in RAM, from which a chat goes on where it was cut: as many as our engine takes, and the one spare.

    One is what llama_state_seq_get_size_ext says of a sequence with LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: Facts.state_bytes.
    """
    n = settings.checkpoint_bytes // facts.state_bytes if facts.state_bytes else 0
    return Term("checkpoints of recurrent state", HOST, (n + 1) * facts.state_bytes if n else 0)


def kept_texts(settings: Settings) -> Term:
    """RAM that our engine takes for texts whose slot another request took."""
    return Term("kept texts", HOST, settings.text_bytes)


def stored_text_bytes(facts: Facts, settings: Settings) -> int:
    """Of a text as long as a slot's context: its rows of the caches, its recurrent state and checkpoints on the way to it.

    What llama_state_seq_get_size_ext says of such a sequence, but for 12 to 24 bytes a token.
    """
    layers = (*facts.layers, *(facts.nextn if settings.load_mtp else ()))
    row = sum(kv_row_bytes(facts, layer.n_head_kv, settings) for layer in layers)
    return row * settings.n_ctx_seq + (1 + CHECKPOINTS_OF_A_TEXT) * facts.state_bytes


def output_buffer(facts: Facts, settings: Settings) -> Term:
    """Logits of every row that one call may ask for. Source: llama_context::output_reserve in src/llama-context.cpp."""
    return Term("output buffer", HOST, F32 * facts.n_vocab * max(settings.n_outputs_max, settings.n_seq_max))


def f16_copies(facts: Facts, settings: Settings, backend: str) -> tuple[int, int]:
    """Bytes of K and of V of one head as f16, where attention needs such a copy while it reads a prompt, else 0.

    CUDA's kernels for many tokens take nothing but f16. Since llama.cpp pull 23907 the copy lies behind the result of attention in the
    compute buffer, as large as the whole cache. Source: ggml_cuda_flash_attn_ext_get_alloc_size in ggml/src/ggml-cuda/fattn.cu.
    """
    if backend in READ_ALL_TYPES:
        return 0, 0
    always = backend in ALWAYS_COPY
    k, v = (always or kind != "f16" for kind in (settings.kv_type_k, settings.kv_type_v))
    return 2 * settings.n_ctx * facts.k_dim * k, 2 * settings.n_ctx * facts.v_dim * v
