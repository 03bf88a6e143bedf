"""Which types the KV cache gets: measured facts about quality and speed, the model's own measured ranges, and what fits."""

from __future__ import annotations

from dataclasses import replace

from a3b_gguf.errors import UsageError
from a3b_gguf.memory.cache import kv_row_bytes
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.place import best, on_gpu
from a3b_gguf.planner.plan import kv_types
from a3b_gguf.tensors import TYPES
from a3b_gguf.units import human_bytes

# Qwen3.5-35B-A3B, Q4_K_M, 512-token pieces: f16 6.0184, q8_0 5.9997, q4_0 6.0422
# (https://r.arson.gg/r/LocalLLAMA?before=t3_1r8ubck). 4 bits: https://github.com/FlashML-org/FreeToken/pull/268 (reasoning) and
# https://github.com/eeshansrivastava89/minimal-ai/issues/18 (tool calls).
MEASURED = "measured no worse than f16 (perplexity 6.00 and 6.02)"
WEAK = "4- and 5-bit caches were measured to weaken reasoning (GSM8K 0.83-0.85 against 0.96) and tool calls past 40,000 tokens"
# An RTX 3060 with Vulkan, Qwen3.6-35B-A3B at 65,536 tokens: 468 tokens/s of prompt with f16, 231 with q8_0, decoding the same.
SLOW_ON = ("Vulkan",)
SLOW = "with Vulkan a q8_0 cache was measured to halve prompt speed (231 instead of 468 tokens/s)"
NO_KERNEL = ("iq4_nl",)  # what ggml_cuda_fattn_kv_type_supported of ggml/src/ggml-cuda/fattn.cu leaves out
LONG_CTX = 65536  # tokens from which a chat that fills its context is expected to stay there
SIZES = ("q4_0", "q8_0", "f16", "bf16")  # a3b_gguf.clip_bounds advises one of these, and nothing smaller


def kv_cache_type(draft: Draft) -> Draft:
    """f16 where it costs nothing, q8_0 where it keeps more of the model on the GPU or the cache is long; 4 bits only by hand.

    Never below what the model's measured activations allow, when somebody measured them.
    """
    asked = kv_types(draft.wishes.kv_type)
    if asked:
        return by_hand(draft, asked)
    exact, small = with_kv(draft, *floor(draft, "f16")), with_kv(draft, *floor(draft, "q8_0"))
    if not divides(draft, "q8_0"):
        return chosen(exact, f"heads of {draft.facts.k_dim} do not divide into q8_0 blocks of 32")
    if kinds(small) == kinds(exact) and draft.advice:
        return chosen(exact, f"measured activations allow nothing smaller: {draft.advice.why}")
    slow = any(gpu.backend in SLOW_ON for gpu in draft.machine.gpus)
    cache, active = cache_bytes(exact), draft.facts.active_bytes
    if cache > active and draft.settings.n_ctx >= LONG_CTX and not slow:
        why = f"at this length a token reads {human_bytes(cache)} of f16 cache, but {human_bytes(active)} of weights"
        return chosen(small, f"{why}; {MEASURED}")
    with_exact, with_small = best(exact), best(small)
    if with_exact and slow:
        return chosen(exact, f"it fits, and {SLOW}")
    if with_exact and (not with_small or on_gpu(with_exact) >= on_gpu(with_small)):
        more = "a smaller cache would not bring more of the model onto the GPU" if draft.machine.gpus else "there is no GPU to make room on"
        return chosen(exact, f"it fits, and {more}")
    saved = f"it saves {human_bytes(cache - cache_bytes(small))}"
    gain = "for more of the model on the GPU" if with_exact else "and f16 does not fit"
    return chosen(small, f"{saved} {gain}; {MEASURED}")


def floor(draft: Draft, name: str) -> tuple[str, str]:
    """K and V of type `name`, or of the larger one that the measured activations ask for."""
    advice = draft.advice
    if advice is None:
        return name, name
    k, v = (max(name, least, key=SIZES.index) for least in (advice.k, advice.v))
    return k, v


def chosen(draft: Draft, why: str) -> Draft:
    k, v = kinds(draft)
    draft = draft.because("KV type", k if k == v else f"{k}/{v}", why)
    for note in draft.advice.notes if draft.advice else ():
        draft = draft.warn(note)
    return draft


def by_hand(draft: Draft, asked: tuple[str, str]) -> Draft:
    """As asked, with warnings about what is known to go wrong. Raises UsageError for a type whose blocks a head does not fill."""
    for name, flag in zip(asked, "KV", strict=True):
        if not divides(draft, name):
            head, block = draft.facts.k_dim if flag == "K" else draft.facts.v_dim, TYPES[name].block
            raise UsageError(f"--kv-type: {name} goes by blocks of {block}, a head of this model's {flag} has {head}", "choose f16")
    shown = asked[0] if asked[0] == asked[1] else "/".join(asked)
    draft = with_kv(draft, *asked).because("KV type", shown, "asked for")
    if any(TYPES[name].bits_per_weight < 8 for name in asked):
        draft = draft.warn(f"KV cache {shown}: {WEAK}")
    if set(asked) & set(NO_KERNEL) and any(gpu.backend not in SLOW_ON for gpu in draft.machine.gpus):
        draft = draft.warn(f"KV cache {shown}: CUDA has no attention kernel for {NO_KERNEL[0]}, attention would be computed on the CPU")
    if asked[0] != asked[1] and draft.machine.gpus:
        draft = draft.warn(f"KV cache {shown}: GPU kernels exist for some pairs of types only, other pairs are converted at every step")
    if not all(TYPES[name].is_float for name in asked) and any(gpu.backend in SLOW_ON for gpu in draft.machine.gpus):
        draft = draft.warn(f"KV cache {shown}: {SLOW}")
    if draft.advice and any(
        TYPES[name].bits_per_weight < TYPES[least].bits_per_weight
        for name, least in zip(asked, (draft.advice.k, draft.advice.v), strict=True)
    ):
        draft = draft.warn(f"KV cache {shown} is below {draft.advice.k}/{draft.advice.v}: {draft.advice.why}")
    return draft


def with_kv(draft: Draft, k: str, v: str) -> Draft:
    return replace(draft, settings=replace(draft.settings, kv_type_k=k, kv_type_v=v))


def kinds(draft: Draft) -> tuple[str, str]:
    return draft.settings.kv_type_k, draft.settings.kv_type_v


def divides(draft: Draft, kind: str) -> bool:
    """Source: the checks of llama_init_from_model in src/llama-context.cpp."""
    block = TYPES[kind].block
    return draft.facts.k_dim % block == 0 and draft.facts.v_dim % block == 0


def cache_bytes(draft: Draft) -> int:
    return sum(kv_row_bytes(draft.facts, layer.n_head_kv, draft.settings) for layer in draft.facts.layers) * draft.settings.n_ctx
