"""The planner's rules in the order in which they decide. Each is a pure function from draft to draft that gives its reason.

To add one: write the function, put its name into RULES, add a row to tests/test_planner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from a3b_gguf.errors import UsageError
from a3b_gguf.memory.cache import stored_text_bytes
from a3b_gguf.memory.settings import padded
from a3b_gguf.planner.changes import longest_context
from a3b_gguf.planner.draft import Draft
from a3b_gguf.planner.kv import kv_cache_type
from a3b_gguf.planner.place import best
from a3b_gguf.planner.plan import DEFAULT_CTX, DEFAULT_MARGIN
from a3b_gguf.planner.speed import OFFLOAD_STEP, offload_rows
from a3b_gguf.planner.where import placement
from a3b_gguf.tensors import TYPES
from a3b_gguf.units import GIB, MIB, human_bytes

LONG_ENOUGH = 2048  # tokens below which a chat with tools hardly fits
CHECKPOINTS = 512 * MIB
CHECKPOINTS_KEPT = (1, 0)  # that a length nobody asked for leaves room for: the first that leaves a length at all
MOST_CHECKPOINTS = 256  # that the engine keeps; see a3b_server.checkpoints
CHECKPOINT_SHARE = 8  # an eighth of what RAM has left
TEXTS = GIB
TEXTS_KEPT = 2  # as long as a slot's context
TEXT_SHARE = 8  # an eighth of what RAM has left
SCORE_SHARE = 4  # a quarter of what RAM has left
SCORE_ROWS = 256  # tokens of a prompt: smaller pieces were measured no slower on a CPU, dense or experts, and have fewer scores
WIDE_HEAD = 128  # numbers: with 256 every CPU that was tried wrote faster without flash attention, with 64 some did and some did not
GAIN = 1.03  # what a measurement must show
PINNED_TRAP = 8192 * MIB  # pinned memory from which Windows drivers were seen to refuse


def context(draft: Draft) -> Draft:
    """Context and slots as asked, within what the model was trained for."""
    trained, slots, own = draft.facts.n_ctx_train, draft.wishes.n_parallel, draft.wishes.n_ctx_slot
    most, flag = (draft.wishes.n_ctx, "--ctx") if own is None else (own, "--ctx-per-slot")
    if most is not None and most > trained:
        raise UsageError(f"{flag} {most:,}: the model was trained for {trained:,} tokens", f"ask for at most {flag} {trained}")
    asked = draft.wishes.n_ctx if own is None else own * slots
    wanted = min(DEFAULT_CTX, trained) if asked is None else asked
    is_split = draft.wishes.kv_split or own is not None
    split = slots if is_split else 1
    n_ctx = padded(-(-wanted // split)) * split
    n_draft = draft.wishes.n_draft
    rows = slots * (1 + n_draft)
    settings = replace(draft.settings, n_ctx=n_ctx, n_seq_max=slots, n_outputs_max=rows, n_draft=n_draft)
    settings = replace(settings, kv_unified=not is_split)
    settings = replace(settings, load_mtp=bool(n_draft and draft.facts.nextn))
    settings = replace(settings, checkpoint_bytes=draft.wishes.checkpoint_bytes or 0, text_bytes=draft.wishes.text_bytes or 0)
    draft = replace(draft, settings=replace(settings, n_ubatch=least_ubatch(draft, n_ctx, rows)))
    if asked is None and not fits_at_all(draft):
        return shortened(draft, n_ctx)
    default = f"the default; the model was trained for {trained:,}" if trained > DEFAULT_CTX else "all that the model was trained for"
    why = default if asked is None else "asked for"
    why += f"; rounded up from {wanted:,}, llama.cpp counts in 256s" if n_ctx != wanted else ""
    if slots > 1:
        why += f"; {n_ctx // slots:,} for each of {slots} slots" if is_split else f"; {slots} slots share it"
    draft = draft.because("context", f"{n_ctx:,} tokens", why)
    if n_ctx < LONG_ENOUGH:
        draft = draft.warn(f"a context of {n_ctx:,} tokens is too short for most chats: a system message with tools takes more")
    return draft


def least_ubatch(draft: Draft, n_ctx: int, rows: int) -> int:
    """512 tokens, or what was asked for; never fewer than one step of all slots with their drafts."""
    asked = draft.wishes.n_ubatch
    if asked is not None and asked < rows:
        raise UsageError(f"--ubatch {asked}: {rows} tokens of all slots and their drafts are computed together", f"ask for --ubatch {rows}")
    return max(min(asked or 512, n_ctx), rows)


def fits_at_all(draft: Draft) -> bool:
    """With the cache as small as the planner would make it of its own accord."""
    try:
        return best(kv_cache_type(draft)) is not None
    except UsageError:
        return True  # the rule itself will say what is wrong


def shortened(draft: Draft, wanted: int) -> Draft:
    """Nobody asked for a length: the longest that fits beside a few checkpoints is taken, and said."""
    chosen, found = kv_cache_type(draft), None
    for kept in CHECKPOINTS_KEPT:
        settings = replace(chosen.settings, checkpoint_bytes=kept * draft.facts.state_bytes)
        found = found or longest_context(replace(chosen, settings=settings))
    if found is None:
        return draft.because("context", f"{wanted:,} tokens", "the default")  # the placement refuses it, with what would help
    n_ctx = found.settings.n_ctx
    draft = replace(draft, settings=replace(draft.settings, n_ctx=n_ctx, n_ubatch=min(draft.settings.n_ubatch, n_ctx)))
    draft = draft.because("context", f"{n_ctx:,} tokens", f"the longest that fits here; the default is {wanted:,}")
    return draft.warn(f"the context is {n_ctx:,} tokens instead of {wanted:,}: more does not fit into the memory of this machine")


def slots(draft: Draft) -> Draft:
    """Requests at a time, and what drafting adds for each."""
    n, drafts = draft.wishes.n_parallel, draft.wishes.n_draft
    draft = draft.because("slots", str(n), "asked for" if n > 1 else "the default: one request at a time has the whole context")
    if not drafts:
        return draft
    by = "by the MTP block" if draft.settings.load_mtp else "from the text so far: this file has no MTP block"
    kept = f"; keeps {drafts} more recurrent states a slot" if draft.facts.n_recurrent else ""
    return draft.because("drafts", f"{drafts} tokens", f"asked for; guessed {by}{kept}")


def attention(draft: Draft) -> Draft:
    """Flash attention, but not on a CPU that is faster without it and has room for the scores of all pairs of tokens."""
    settings, ram = draft.settings, draft.budgets[0]
    if not TYPES[settings.kv_type_v].is_float:
        return draft.because("flash attention", "on", "needed for a quantized V")
    if draft.placement.uses_gpu:
        return draft.because("flash attention", "on", "no scores of context times batch in memory")
    if settings.kv_unified and settings.n_seq_max > 1:
        why = "without it each slot would be compared with the tokens of all; --ctx-per-slot parts them"
        return draft.because("flash attention", "on", why)
    faster, why = without_flash(draft)
    if not faster:
        return draft.because("flash attention", "on", why)
    rows = settings.n_ubatch if draft.wishes.n_ubatch else min(settings.n_ubatch, max(SCORE_ROWS, settings.n_outputs_max))
    trial = replace(draft, settings=replace(settings, flash_attn=False, n_ubatch=rows))
    scores = max(0, trial.n_bytes - draft.n_bytes)
    if scores > ram.room // SCORE_SHARE:
        why = f"a CPU is faster without it in long chats, but {human_bytes(scores)} of scores are more than a quarter of what RAM has left"
        return draft.because("flash attention", "on", why)
    return trial.because("flash attention", "off", f"{why}; takes {human_bytes(scores)} more")


def without_flash(draft: Draft) -> tuple[bool, str]:
    """Whether this CPU is faster without flash attention, and how that is known."""
    cost, width = draft.machine.attention, draft.facts.k_dim
    if cost is None:
        if width >= WIDE_HEAD:
            return True, f"two CPUs wrote 1.3 to 2.1 times as fast without it in long chats with heads of 256; these have {width}"
        return False, f"with heads of {width} some CPUs are faster without it and some are not; on the machine itself it is measured"
    (write, write_without), (read, read_without) = cost.write, cost.read
    told = (
        f"measured here: attention of a token after {cost.n_kv:,} takes {1000 * write:.2f} ms with it, {1000 * write_without:.2f} without; "
        f"of one of so long a prompt {1000 * read:.2f} and {1000 * read_without:.2f}"
    )
    return cost.gain >= GAIN, told


def batch(draft: Draft) -> Draft:
    """Says why prompts are read in pieces of this size, which the placement has chosen together with what stays in RAM."""
    rows, asked = draft.settings.n_ubatch, draft.wishes.n_ubatch
    value = f"{rows:,} tokens"
    if asked is not None:
        return draft.because("batch", value, "asked for" if rows == asked else f"asked for {asked:,}, the context has no more")
    if draft.placement.uses_gpu and draft.placement.has_overrides:
        why = "each piece of a prompt copies the experts in RAM to the GPU once"
        more = ": large pieces copy less" if rows > 512 else "; larger pieces would push more experts into RAM than they gain"
        return draft.because("batch", value, why + more)
    return draft.because("batch", value, "enough to keep the matrix units busy; more only costs memory")


def op_offload(draft: Draft) -> Draft:
    """From how many tokens on a prompt's experts are copied to the GPU instead of computed on the CPU."""
    rows = offload_rows(draft.facts, draft.machine, draft.placement, draft.settings)
    if rows is None or rows == OFFLOAD_STEP:
        return draft if rows is None else draft.because("copying experts", f"from {rows} tokens", "llama.cpp's own value is right here")
    why = f"below {rows:,} tokens the CPU is done with the experts before PCIe has copied them; llama.cpp's own 32 suits dense models"
    draft = replace(draft, environment=(*draft.environment, ("GGML_OP_OFFLOAD_MIN_BATCH", str(rows))))
    return draft.because("copying experts", f"from {rows:,} tokens", why)


def threads(draft: Draft) -> Draft:
    """One thread a physical core."""
    n, whose = draft.machine.n_cores, " of this machine" if draft.machine.described else ""
    why = f"one a physical core{whose}: more were measured to be slower, they wait for the same memory"
    return replace(draft, n_threads=n).because("threads", str(n), why)


def load_mode(draft: Draft) -> Draft:
    """Says how the file gets into memory; `Draft.settled` has chosen, because the choice changes what fits."""
    if draft.placement.uses_gpu:
        mapped = "what is on the GPU is copied there once, and pages of the file can be dropped"
        pinned = "weights in RAM go into pinned memory, from which a GPU copies faster (prompts measured 64 % faster)"
    else:
        mapped = "the weights are used where they lie, and the system may drop pages"
        pinned = "the CPU's kernels want these types in another order: reading into place avoids a second copy"
    draft = draft.because("file", *(("mapped", mapped) if draft.settings.use_mmap else ("read into memory", pinned)))
    held = sum(term.n_bytes for term in draft.terms if term.held == "pinned")
    if draft.machine.system == "Windows" and held > PINNED_TRAP:
        text = f"{human_bytes(held)} of pinned memory: Windows drivers were seen to refuse that with \"out of memory\""
        return draft.warn(f"{text} while the GPU has room; if loading fails, set GGML_CUDA_NO_PINNED=1")
    return draft


def checkpoints(draft: Draft) -> Draft:
    """RAM for copies of recurrent states, from which a chat goes on: without them each turn reads the whole chat again."""
    one, asked = draft.facts.state_bytes, draft.wishes.checkpoint_bytes
    if not one:
        if asked:
            draft = draft.warn("--checkpoints: this model has no recurrent layers, there is nothing to copy")
        return replace(draft, settings=replace(draft.settings, checkpoint_bytes=0))
    ram = draft.budgets[0]
    free = min(ram.left // CHECKPOINT_SHARE, ram.room - one)  # one more is kept as a spare
    n_bytes = asked if asked is not None else min(CHECKPOINTS, MOST_CHECKPOINTS * one, free) if free >= one else 0
    draft = replace(draft, settings=replace(draft.settings, checkpoint_bytes=n_bytes))
    if n_bytes < one:
        draft = draft.warn(f"no room for a checkpoint of {human_bytes(one)} in RAM: each turn of a chat is read again from its start")
        return draft.because("checkpoints", "none", "asked for" if asked is not None else "too little RAM stays free")
    why = f"in RAM, {human_bytes(one)} each: a chat goes on where it was, instead of being read again"
    why = f"asked for; {why}" if asked is not None else f"{why}; at most an eighth of what RAM has left"
    return draft.because("checkpoints", f"{n_bytes // one} ({human_bytes(n_bytes)})", why)


def kept_texts(draft: Draft) -> Draft:
    """RAM for texts whose slot another request took. A chat that asks between its turns for a title, with one slot, needs it."""
    asked, ram = draft.wishes.text_bytes, draft.budgets[0]
    if draft.facts.pools:
        draft = draft.warn("--keep-texts: this model makes vectors, there is no chat to go on") if asked else draft
        return replace(draft, settings=replace(draft.settings, text_bytes=0))
    most = TEXTS_KEPT * stored_text_bytes(draft.facts, draft.settings)
    n_bytes = max(0, min(TEXTS, most, ram.left // TEXT_SHARE, ram.room)) if asked is None else asked
    draft = replace(draft, settings=replace(draft.settings, text_bytes=n_bytes))
    if not n_bytes:
        return draft.because("kept texts", "none", "too little RAM stays free" if asked is None else "asked for, or --states keeps them")
    why = "in RAM, for chats whose slot another request took: they go on, instead of being read again"
    why = f"{why}; at most an eighth of what RAM has left" if asked is None else f"asked for; {why}"
    return draft.because("kept texts", human_bytes(n_bytes), why)


def outputs(draft: Draft) -> Draft:
    """Logits only where a token is sampled."""
    saved = 4 * draft.facts.n_vocab * (draft.settings.n_rows - draft.settings.n_outputs_max)
    n = draft.settings.n_outputs_max
    value, whose = "1 row" if n == 1 else f"{n} rows", "slot and drafted token" if draft.settings.n_draft else "slot"
    return draft.because("logits", value, f"one for each {whose}; one for every token would take {human_bytes(saved)} more")


def margin(draft: Draft) -> Draft:
    """Warns about what is known to go wrong: small margins, drafts beside experts in RAM, shared memory of Windows."""
    if not draft.placement.uses_gpu:
        return draft
    if draft.wishes.margin < DEFAULT_MARGIN:
        small, enough = human_bytes(draft.wishes.margin), human_bytes(DEFAULT_MARGIN)
        draft = draft.warn(f"a margin of {small}: cards with less than {enough} left were seen to load and then answer nothing")
        if draft.machine.system == "Windows":
            draft = draft.warn("on Windows a GPU that is too full does not fail, it crawls: its driver moves buffers into RAM")
    if draft.settings.load_mtp and draft.placement.has_overrides:
        draft = draft.warn("drafts beside experts in RAM were measured to gain little or nothing: each drafted token reads other experts")
    return draft


Rule = Callable[[Draft], Draft]
# Context first, since everything grows with it; the cache's type before placement, since it decides what is left for weights.
RULES: tuple[Rule, ...] = (
    context, slots, kv_cache_type, placement, attention, batch, op_offload, threads, load_mode, checkpoints, kept_texts, outputs,
    margin,
)  # fmt: skip
