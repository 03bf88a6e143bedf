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
    "as many V heads as K heads": (Form(mtp=False), Sizes(n_layer=2, k_heads=4, v_heads=4)),
}
