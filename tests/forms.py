"""The forms of the random checkpoints that llama.cpp's own converter was run on: name -> (form, sizes)."""

from __future__ import annotations

from tiny import Form, Sizes

FORMS: dict[str, tuple[Form, Sizes]] = {
    "flat packed": (Form(), Sizes()),
    "flat per expert": (Form(packed=False, mtp_packed=False), Sizes()),
    "nested packed, vision, three shards": (Form(nested=True, vision=True, shards=3), Sizes()),
    "tied, no MTP": (Form(tied=True, mtp=False), Sizes()),
    "f16": (Form(dtype="F16"), Sizes()),
    "eight V heads for each K head": (Form(mtp=False), Sizes(n_layer=2, k_heads=1, v_heads=8)),
    "qwen3moe": (Form(arch="qwen3moe", mtp=False, packed=False), Sizes(n_layer=2)),
    "qwen3moe packed, wide": (Form(arch="qwen3moe", mtp=False), Sizes(n_layer=1, hidden=256, ff=256)),
    "qwen3moe with YaRN, tied": (Form(arch="qwen3moe", mtp=False, yarn=True, tied=True), Sizes(n_layer=1)),
    "qwen3vlmoe, vision": (Form(arch="qwen3vlmoe", nested=True, turned=True, vision=True, mtp=False), Sizes(n_layer=2, ff=48)),
    "qwen3vlmoe, hidden = 2 ff": (Form(arch="qwen3vlmoe", nested=True, turned=True, mtp=False), Sizes(n_layer=1)),
    "qwen3next": (Form(arch="qwen3next", packed=False, mtp_packed=False), Sizes()),
    "qwen3next, eight V heads for each K head, no MTP": (Form(arch="qwen3next", mtp=False), Sizes(n_layer=4, k_heads=1, v_heads=8)),
    "as many V heads as K heads": (Form(mtp=False), Sizes(n_layer=2, k_heads=4, v_heads=4)),
}

# Those that the Hugging Face implementation was run on: experts as its classes expect them, several layers, logits with a range.
COMPUTED: dict[str, tuple[Form, Sizes]] = {
    "qwen35moe": (Form(mtp=False), Sizes()),
    "qwen3moe": (Form(arch="qwen3moe", mtp=False, packed=False), Sizes(n_layer=3)),
    "qwen3moe with YaRN": (Form(arch="qwen3moe", mtp=False, packed=False, yarn=True), Sizes(n_layer=2)),
    "qwen3vlmoe": (Form(arch="qwen3vlmoe", nested=True, turned=True, mtp=False), Sizes(n_layer=2, ff=48)),
    "qwen3next": (Form(arch="qwen3next", mtp=False, packed=False), Sizes(k_heads=2, v_heads=6)),
}

# Those whose MTP block alone was written as well.
DRAFTS: dict[str, tuple[Form, Sizes]] = {
    "qwen35moe draft": (Form(nested=True, vision=True), Sizes()),
    "qwen3next draft": (Form(arch="qwen3next"), Sizes()),
}
