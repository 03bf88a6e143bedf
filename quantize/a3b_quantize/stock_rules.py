"""llama-quantize's choice of types as a table: one row for each branch of its code.

Source: llama_tensor_get_type_impl and tensor_allows_quantization in src/llama-quant.cpp of llama.cpp. Left out are only the branches for
architectures in FOREIGN, which `stock` refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FOREIGN = ("falcon", "glm5-next", "bailingmoe3")

# A tensor with one of these in its name stays as it is.
PROTECTED = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d",
    "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight", "time_mix_w0.weight",
    "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight",
    "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight", "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.",
    "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
PROTECTED_NAMES = ("position_embd.weight", "token_types.weight")

# Part of the name -> category; the first that occurs wins. Source: tensor_get_category
CATEGORIES = (
    ("attn_qkv.weight", "attn_v"), ("attn_kv_b.weight", "attn_v"), ("attn_v.weight", "attn_v"), ("attn_k.weight", "attn_k"),
    ("attn_q.weight", "attn_q"), ("attn_output.weight", "attn_output"), ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"),
    ("ffn_down", "ffn_down"),
)  # fmt: skip

LOW = ("iq2_xxs", "iq2_xs", "iq1_s", "iq2_s", "iq2_m", "iq1_m")
SMALL_OUTPUT = (*LOW, "iq3_xxs")
# Embeddings that are not shared with the output. Other file types: their default type.
TOKEN_EMBD = {
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"), "q2_k"),
    **dict.fromkeys(("iq2_s", "iq2_m", "iq3_xxs"), "iq3_s"),
    **dict.fromkeys(("tq1_0", "tq2_0", "q2_0"), "q4_k"),
}
# Layers of the models that llama.cpp calls 70B, by architecture. Source: src/models/{qwen2,deci,olmo,jais2}.cpp; llama: see stock
LAYERS_OF_70B = {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}


@dataclass(frozen=True, slots=True)
class Place:
    """What the rules may ask about a tensor. layer, n_layer: as llama-quantize counts them, MTP blocks included.

    i_down counts the ffn_down tensors before this one, i_attn_v the attn_v-like ones, whatever layer they are in.
    """

    layer: int
    n_layer: int
    i_down: int
    i_attn_v: int
    n_attn_v: int
    n_gqa: int
    n_expert: int
    has_imatrix: bool


Test = Callable[[Place], bool]


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of `category` in a file of one of `file_types` gets `type` when `test` holds. The first row wins."""

    category: str
    file_types: tuple[str, ...]
    test: Test
    type: str
    why: str


def more_bits(i: int, n: int) -> bool:
    """The layers that the `_M` mixtures favour: the first and last eighth and every third between. Source: use_more_bits"""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def always(p: Place) -> bool:
    return True


def wide_gqa(p: Place) -> bool:
    return p.n_gqa >= 4


def eight_experts(p: Place) -> bool:
    return p.n_expert == 8


def other_experts(p: Place) -> bool:
    return p.n_expert != 8


def first_eighth(p: Place) -> bool:
    return p.layer < p.n_layer // 8


def favoured(p: Place) -> bool:
    return more_bits(p.layer, p.n_layer)


ATTN_V = (
    Row("attn_v", LOW, lambda p: p.n_gqa >= 4 or p.n_expert >= 4, "q4_k", "values of grouped heads or of experts"),
    Row("attn_v", ("iq2_s", "iq2_m"), always, "iq3_s", "values"),
    Row("attn_v", LOW, always, "q2_k", "values"),
    Row("attn_v", ("q2_k", "q2_k_s", "iq3_xxs", "iq3_xs", "iq3_s"), wide_gqa, "q4_k", "values shared by 4 or more query heads"),
    Row("attn_v", ("q2_k",), always, "q3_k", "values"),
    Row("attn_v", ("iq3_xxs",), lambda p: not p.has_imatrix, "iq3_s", "values without an importance matrix"),
    Row("attn_v", ("iq3_xxs",), always, "iq3_xxs", "values"),
    Row("attn_v", ("iq3_m",), always, "q4_k", "values"),
    Row("attn_v", ("q3_k_m",), lambda p: p.i_attn_v < 2, "q5_k", "values of the first two layers"),
    Row("attn_v", ("q3_k_m",), always, "q4_k", "values"),
    Row("attn_v", ("q3_k_l",), always, "q5_k", "values"),
    Row("attn_v", ("iq4_nl", "iq4_xs"), wide_gqa, "q5_k", "values shared by 4 or more query heads"),
    Row("attn_v", ("q4_k_m", "q5_k_m"), lambda p: more_bits(p.i_attn_v, p.n_attn_v), "q6_k", "values of a favoured layer"),
    Row("attn_v", ("q4_k_s",), lambda p: p.i_attn_v < 4, "q5_k", "values of the first four layers"),
)
ATTN_QK = (
    Row("attn_k", LOW, eight_experts, "q4_k", "keys of an 8-expert model"),
    Row("attn_k", (), eight_experts, "q8_0", "keys of an 8-expert model"),
    Row("attn_k", ("iq3_xs",), always, "iq3_xxs", "keys"),
    Row("attn_k", ("iq3_xxs",), always, "iq2_s", "keys"),
    Row("attn_q", ("iq3_xs",), always, "iq3_xxs", "queries"),
    Row("attn_q", ("iq3_xxs",), always, "iq2_s", "queries"),
)
EIGHT_EXPERT_OUTPUT = ("q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq3_s", "iq3_m", "iq4_xs", *LOW)
ATTN_OUTPUT = (
    Row("attn_output", EIGHT_EXPERT_OUTPUT, eight_experts, "q5_k", "attention output of an 8-expert model"),
    Row("attn_output", ("iq1_s", "iq1_m"), other_experts, "iq2_xxs", "attention output"),
    Row("attn_output", ("iq2_s", "iq2_m", "iq3_xxs"), other_experts, "iq3_s", "attention output"),
    Row("attn_output", ("q2_k",), other_experts, "q3_k", "attention output"),
    Row("attn_output", ("q3_k_m", "iq3_m"), other_experts, "q4_k", "attention output"),
    Row("attn_output", ("q3_k_l",), other_experts, "q5_k", "attention output"),
)
FFN_DOWN = (
    Row("ffn_down", ("iq2_s", "iq2_m"), lambda p: p.i_down < p.n_layer // 8, "iq3_s", "one of the first FFN outputs"),
    Row("ffn_down", LOW, lambda p: p.i_down < p.n_layer // 8, "q2_k", "one of the first FFN outputs"),
    Row("ffn_down", ("q2_k",), always, "q3_k", "FFN output"),
    Row("ffn_down", ("q2_k_s",), first_eighth, "q4_k", "FFN output of the first eighth of the layers"),
    Row("ffn_down", ("iq3_xxs",), lambda p: not p.has_imatrix and first_eighth(p), "q4_k", "early FFN output, no imatrix"),
    Row("ffn_down", ("iq3_xxs",), lambda p: not p.has_imatrix, "q3_k", "FFN output, no imatrix"),
    Row("ffn_down", ("q3_k_m",), lambda p: p.layer < p.n_layer // 16, "q5_k", "FFN output of the first sixteenth of the layers"),
    Row("ffn_down", ("q3_k_m",), always, "q4_k", "FFN output"),
    Row("ffn_down", ("iq3_m",), lambda p: first_eighth(p) or (eight_experts(p) and favoured(p)), "q4_k", "FFN output of a favoured layer"),
    Row("ffn_down", ("q3_k_l",), always, "q5_k", "FFN output"),
    Row("ffn_down", ("q4_k_m", "q5_k_m"), favoured, "q6_k", "FFN output of a favoured layer"),
    Row("ffn_down", ("iq4_nl", "iq4_xs"), lambda p: first_eighth(p) and not p.has_imatrix, "q5_k", "early FFN output, no imatrix"),
    Row("ffn_down", ("q4_k_s",), first_eighth, "q5_k", "FFN output of the first eighth of the layers"),
    Row("ffn_down", ("q4_0",), lambda p: first_eighth(p) and p.has_imatrix, "q4_1", "early FFN output, with an imatrix"),
    Row("ffn_down", ("q5_0",), lambda p: first_eighth(p) and p.has_imatrix, "q5_1", "early FFN output, with an imatrix"),
)
FFN_IN = tuple(
    Row(category, ("iq3_xs",), lambda p: p.n_layer // 8 <= p.layer < 7 * p.n_layer // 8, "iq3_xxs", "FFN input of a middle layer")
    for category in ("ffn_gate", "ffn_up")
)
ROWS = (*ATTN_V, *ATTN_QK, *ATTN_OUTPUT, *FFN_DOWN, *FFN_IN)
