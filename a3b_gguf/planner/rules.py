"""The planner's rules in the order in which they decide. Each is a pure function from draft to draft that gives its reason.

To add one: write the function, put its name into RULES, add a row to tests/test_planner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from a3b_gguf.errors import UsageError
from a3b_gguf.memory.placement import HOST
from a3b_gguf.memory.settings import padded
from a3b_gguf.memory.terms import kv_row_bytes
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.place import best, ignoring_hand, on_gpu
from a3b_gguf.planner.plan import DEFAULT_CTX, DEFAULT_MARGIN, kv_types
from a3b_gguf.planner.refuse import refusal
from a3b_gguf.tensors import TYPES
from a3b_gguf.units import human_bytes

LARGE_UBATCHES = (2048, 1024)
# Qwen3.5-35B-A3B, Q4_K_M, 512-token pieces: f16 6.0184, q8_0 5.9997, q4_0 6.0422
# (https://r.arson.gg/r/LocalLLAMA?before=t3_1r8ubck). 4 bits: https://github.com/FlashML-org/FreeToken/pull/268 (reasoning) and
# https://github.com/eeshansrivastava89/minimal-ai/issues/18 (tool calls).
MEASURED = "measured no worse than f16 (perplexity 6.00 and 6.02)"
WEAK = "4- and 5-bit caches were measured to weaken reasoning (GSM8K 0.83-0.85 against 0.96) and tool calls past 40,000 tokens"
LONG_CTX = 65536  # tokens from which a chat that fills its context is expected to stay there
LONG_ENOUGH = 2048  # tokens below which a chat with tools hardly fits


def context(draft: Draft) -> Draft:
    """Context and slots as asked, within what the model was trained for."""
    trained, asked, slots = draft.facts.n_ctx_train, draft.wishes.n_ctx, draft.wishes.n_parallel
    if asked is not None and asked > trained:
        raise UsageError(f"--ctx {asked:,}: the model was trained for {trained:,} tokens", f"ask for at most --ctx {trained}")
    wanted = min(DEFAULT_CTX, trained) if asked is None else asked
    n_ctx = padded(wanted)
    default = f"the default; the model was trained for {trained:,}" if trained > DEFAULT_CTX else "all that the model was trained for"
    why = default if asked is None else "asked for"
    why += f"; rounded up from {wanted:,}, llama.cpp counts in 256s" if n_ctx != wanted else ""
    why += f"; {slots} slots share it" if slots > 1 else ""
    settings = replace(draft.settings, n_ctx=n_ctx, n_seq_max=slots, n_outputs_max=slots, n_ubatch=min(512, n_ctx))
    draft = replace(draft, settings=settings).because("context", f"{n_ctx:,} tokens", why)
    if n_ctx < LONG_ENOUGH:
        draft = draft.warn(f"a context of {n_ctx:,} tokens is too short for most chats: a system message with tools takes more")
    return draft.because("slots", str(slots), "asked for" if slots > 1 else "the default: one request at a time has the whole context")


def kv_cache_type(draft: Draft) -> Draft:
    """f16 where it costs nothing, q8_0 where it keeps more of the model on the GPU or the cache is long; 4 bits only by hand."""
    asked = kv_types(draft.wishes.kv_type)
    if asked:
        return kv_by_hand(draft, asked)
    exact, small = with_kv(draft, "f16", "f16"), with_kv(draft, "q8_0", "q8_0")
    if not divides(draft, "q8_0"):
        return exact.because("KV type", "f16", f"heads of {draft.facts.k_dim} do not divide into q8_0 blocks of 32")
    cache, active = cache_bytes(exact), draft.facts.active_bytes
    if cache > active and draft.settings.n_ctx >= LONG_CTX:
        why = f"at this length a token reads {human_bytes(cache)} of f16 cache, but {human_bytes(active)} of weights; q8_0 halves it"
        return small.because("KV type", "q8_0", f"{why}; {MEASURED}")
    with_exact, with_small = best(exact), best(small)
    if with_exact and (not with_small or on_gpu(with_exact) >= on_gpu(with_small)):
        more = "a smaller cache would not bring one more layer onto the GPU" if draft.machine.gpus else "there is no GPU to make room on"
        return exact.because("KV type", "f16", f"it fits, and {more}")
    saved = f"it saves {human_bytes(cache - cache_bytes(small))}"
    why = f"{saved} for more of the model on the GPU" if with_exact else f"{saved}, and f16 does not fit"
    return small.because("KV type", "q8_0", f"{why}; {MEASURED}")


def kv_by_hand(draft: Draft, asked: tuple[str, str]) -> Draft:
    for name, flag in zip(asked, "KV", strict=True):
        if not divides(draft, name):
            head, block = draft.facts.k_dim if flag == "K" else draft.facts.v_dim, TYPES[name].block
            raise UsageError(f"--kv-type: {name} goes by blocks of {block}, a head of this model's {flag} has {head}", "choose f16")
    shown = asked[0] if asked[0] == asked[1] else "/".join(asked)
    draft = with_kv(draft, *asked).because("KV type", shown, "asked for")
    if any(TYPES[name].bits_per_weight < 8 for name in asked):
        draft = draft.warn(f"KV cache {shown}: {WEAK}")
    if asked[0] != asked[1] and draft.machine.gpus:
        draft = draft.warn(f"KV cache {shown}: GPU kernels exist for some pairs of types only, other pairs are converted at every step")
    return draft


def placement(draft: Draft) -> Draft:
    """Where layers and experts go; the wish is refused when nothing fits."""
    found = best(draft)
    by_hand = draft.wishes.n_gpu_layers is not None or draft.wishes.n_cpu_moe is not None
    if not found and by_hand:  # obeyed as long as it fits at all: the margin is then the user's
        found = best(replace(draft, wishes=replace(draft.wishes, margin=0)))
        if found:
            found = replace(found, wishes=draft.wishes)
            tight = min((budget for budget in found.budgets if budget.device != HOST), key=lambda budget: budget.left)
            found = found.warn(f"{tight.device}: only {human_bytes(tight.left)} stay free; loads like this often fail at the first request")
    if not found:
        raise refusal(draft)
    ideal = best(ignoring_hand(draft)) if by_hand else None
    if ideal and on_gpu(ideal) > on_gpu(found):
        layers, experts = on_gpu(ideal)
        found = found.warn(f"by hand less is on the GPU than fits: {layers} layers, {experts} of them with their experts, would be faster")
    return explained(found, by_hand)


def explained(draft: Draft, by_hand: bool) -> Draft:
    """The reason for a placement that is already made."""
    facts, here = draft.facts, draft.placement
    if not here.uses_gpu:
        asked = "--n-gpu-layers 0 was asked for" if draft.wishes.n_gpu_layers == 0 and draft.machine.gpus else ""
        why = asked or ("the GPU has no room for a single layer" if draft.machine.gpus else "there is no GPU")
        return draft.because("layers on GPU", "none", why)
    all_layers = here.n_gpu_layers > facts.n_layer_all
    fit = "all of them fit" + (", apart from experts" if here.cpu_experts else "")
    why = fit if all_layers else "no more fit; the rest stays in RAM"
    value = f"{on_gpu(draft)[0]} of {facts.n_layer}" + ("" if here.output == HOST else " and the output")
    draft = draft.because("layers on GPU", value, why if draft.wishes.n_gpu_layers is None else "asked for")
    if not facts.n_expert:
        return draft
    if not here.cpu_experts:
        return draft.because("experts in RAM", "none", "asked for" if by_hand else "the experts of these layers fit onto the GPU")
    in_ram = sum(facts.layers[i].experts for i in here.cpu_experts)
    used = f"{facts.n_expert_used} of {facts.n_expert} experts"
    why = "asked for" if draft.wishes.n_cpu_moe is not None else "the fewest that leave the margin free"
    why += f"; of their {human_bytes(in_ram)} a token reads only {used}"
    return draft.because("experts in RAM", f"{len(here.cpu_experts)} layers ({spans(here.cpu_experts)})", why)


def batch(draft: Draft) -> Draft:
    """Prompts in larger pieces when experts in RAM must be copied to the GPU once for each piece."""
    rows = draft.settings.n_ubatch
    if draft.placement.uses_gpu and draft.placement.cpu_experts:
        for larger in LARGE_UBATCHES:
            trial = replace(draft, settings=replace(draft.settings, n_ubatch=larger))
            if larger <= draft.settings.n_ctx and trial.fits:
                why = "each piece of a prompt copies the experts in RAM to the GPU once: large pieces copy less"
                return trial.because("batch", f"{larger:,} tokens", why)
        return draft.because("batch", f"{rows:,} tokens", "larger pieces would read prompts faster, but their buffers do not fit")
    return draft.because("batch", f"{rows:,} tokens", "enough to keep the matrix units busy; more only costs memory")


def threads(draft: Draft) -> Draft:
    """One thread a physical core."""
    n, whose = draft.machine.n_cores, "of this machine " if draft.machine.described else ""
    why = f"one a physical core {whose}: more were measured to be slower, they wait for the same memory".replace(" :", ":")
    return replace(draft, n_threads=n).because("threads", str(n), why)


def load_mode(draft: Draft) -> Draft:
    """Says how the file gets into memory; `Draft.arranged` has chosen, because the choice changes what fits."""
    if draft.placement.uses_gpu:
        mapped = "what is on the GPU is copied there once, and pages of the file can be dropped"
        pinned = "weights in RAM go into pinned memory, from which a GPU copies faster (prompts measured 64 % faster)"
    else:
        mapped = "the weights are used where they lie, and the system may drop pages"
        pinned = "the CPU's kernels want these types in another order: reading into place avoids a second copy"
    return draft.because("file", *(("mapped", mapped) if draft.settings.use_mmap else ("read into memory", pinned)))


def outputs(draft: Draft) -> Draft:
    """Logits only where a token is sampled, and flash attention always."""
    saved = 4 * draft.facts.n_vocab * (draft.settings.n_rows - draft.settings.n_outputs_max)
    n = draft.settings.n_outputs_max
    value = "1 row" if n == 1 else f"{n} rows"
    draft = draft.because("logits", value, f"one for each slot; one for every token would take {human_bytes(saved)} more")
    why = "needed for a quantized V" if not TYPES[draft.settings.kv_type_v].is_float else "no scores of context times batch in memory"
    return draft.because("flash attention", "on", why)


def margin(draft: Draft) -> Draft:
    """Warns about a margin below the default: users with 0.7 GiB left got servers that load and then answer nothing."""
    if draft.placement.uses_gpu and draft.wishes.margin < DEFAULT_MARGIN:
        small, enough = human_bytes(draft.wishes.margin), human_bytes(DEFAULT_MARGIN)
        return draft.warn(f"a margin of {small}: cards with less than {enough} left were seen to load and then answer nothing")
    return draft


Rule = Callable[[Draft], Draft]
# Context first, since everything grows with it; the cache's type before placement, since it decides what is left for weights.
RULES: tuple[Rule, ...] = (context, kv_cache_type, placement, batch, threads, load_mode, outputs, margin)


def with_kv(draft: Draft, k: str, v: str) -> Draft:
    return replace(draft, settings=replace(draft.settings, kv_type_k=k, kv_type_v=v))


def divides(draft: Draft, kind: str) -> bool:
    """Source: the checks of llama_init_from_model in src/llama-context.cpp."""
    block = TYPES[kind].block
    return draft.facts.k_dim % block == 0 and draft.facts.v_dim % block == 0


def cache_bytes(draft: Draft) -> int:
    return sum(kv_row_bytes(draft.facts, layer.n_head_kv, draft.settings) for layer in draft.facts.layers) * draft.settings.n_ctx


def spans(layers: tuple[int, ...]) -> str:
    """ "0-23, 40-41" """
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
