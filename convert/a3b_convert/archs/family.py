"""Rows and names that several architectures of the family share."""

from __future__ import annotations

from a3b_convert.archs.base import Either, Row, Table, plus_one
from a3b_convert.layout import half, turned

EMBEDDING = Row("model.embed_tokens.weight", "token_embd.weight", "vocab hidden")
OUTPUT = Row("lm_head.weight", "output.weight", "vocab hidden")

CONV, MLX_CONV = "qkv 1 kernel", "qkv kernel 1"  # shapes of conv1d.weight

# How routed experts lie in a checkpoint: packed as [E, rows, columns], packed and transposed (Qwen3-VL-MoE), one tensor for each
# expert, or packed under MLX's names.
GATE, UP, DOWN = (f"blk.{{i}}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
GATE_UP_FORMS: dict[str, tuple[Row, ...]] = {
    "packed": (
        Row("{block}.mlp.experts.gate_up_proj", GATE, "experts gate_up hidden", half(0)),
        Row("{block}.mlp.experts.gate_up_proj", UP, "experts gate_up hidden", half(1)),
    ),
    "transposed": (
        Row("{block}.mlp.experts.gate_up_proj", GATE, "experts hidden gate_up", turned(0, 2)),
        Row("{block}.mlp.experts.gate_up_proj", UP, "experts hidden gate_up", turned(1, 2)),
    ),
    "single": (
        Row("{block}.mlp.experts.{e}.gate_proj.weight", GATE, "ff hidden"),
        Row("{block}.mlp.experts.{e}.up_proj.weight", UP, "ff hidden"),
    ),
    "mlx": (
        Row("{block}.mlp.switch_mlp.gate_proj.weight", GATE, "experts ff hidden"),
        Row("{block}.mlp.switch_mlp.up_proj.weight", UP, "experts ff hidden"),
    ),
}
DOWN_FORMS: dict[str, tuple[Row, ...]] = {
    "packed": (Row("{block}.mlp.experts.down_proj", DOWN, "experts hidden ff"),),
    "transposed": (Row("{block}.mlp.experts.down_proj", DOWN, "experts ff hidden", turned(0, 1)),),
    "single": (Row("{block}.mlp.experts.{e}.down_proj.weight", DOWN, "hidden ff"),),
    "mlx": (Row("{block}.mlp.switch_mlp.down_proj.weight", DOWN, "experts hidden ff"),),
}
# One choice for all three: where hidden = 2 x ff the shape of gate_up_proj does not tell, but that of down_proj does.
EXPERTS: Either = tuple(
    gate_up + down
    for form, gate_up in GATE_UP_FORMS.items()
    for other, down in DOWN_FORMS.items()
    if {form, other} != {"packed", "transposed"}
)
ROUTER = Row("{block}.mlp.gate.weight", "blk.{i}.ffn_gate_inp.weight", "experts hidden", f32=True)

# Of the architectures whose norms are used as 1 + w, and whose attention has an output gate.
SHARED_MOE: Table = (
    Row("{block}.post_attention_layernorm.weight", "blk.{i}.post_attention_norm.weight", "hidden", value=plus_one, f32=True),
    ROUTER,
    EXPERTS,
    Row("{block}.mlp.shared_expert_gate.weight", "blk.{i}.ffn_gate_inp_shexp.weight", "1 hidden", f32=True),
    Row("{block}.mlp.shared_expert.gate_proj.weight", "blk.{i}.ffn_gate_shexp.weight", "shared_ff hidden"),
    Row("{block}.mlp.shared_expert.up_proj.weight", "blk.{i}.ffn_up_shexp.weight", "shared_ff hidden"),
    Row("{block}.mlp.shared_expert.down_proj.weight", "blk.{i}.ffn_down_shexp.weight", "hidden shared_ff"),
)
GATED_ATTENTION: Table = (
    Row("{block}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden", value=plus_one, f32=True),
    Row("{block}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", "q_and_gate hidden"),
    Row("{block}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", "kv hidden"),
    Row("{block}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight", "kv hidden"),
    Row("{block}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight", "hidden q"),
    Row("{block}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight", "head", value=plus_one, f32=True),
    Row("{block}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight", "head", value=plus_one, f32=True),
)
NEXTN: Table = (
    Row("mtp.fc.weight", "blk.{i}.nextn.eh_proj.weight", "hidden two_hidden"),
    Row("mtp.pre_fc_norm_embedding.weight", "blk.{i}.nextn.enorm.weight", "hidden", value=plus_one, f32=True),
    Row("mtp.pre_fc_norm_hidden.weight", "blk.{i}.nextn.hnorm.weight", "hidden", value=plus_one, f32=True),
    Row("mtp.norm.weight", "blk.{i}.nextn.shared_head_norm.weight", "hidden", value=plus_one, f32=True),
)

PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.mtp.", "mtp."),
    ("language_model.mtp.", "mtp."),
)
IGNORE = (
    ("model.visual.*", "vision"),
    ("visual.*", "vision"),
    ("vision_tower.*", "vision"),
    ("*.rotary_emb.inv_freq", "rotary tables"),
)
