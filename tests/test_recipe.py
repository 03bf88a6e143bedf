"""Recipes: they load, every rule has work, and bad ones are refused with their number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.roles import PATTERNS, ROLES, role_of
from a3b_gguf.tensors import TYPES, Model
from a3b_quantize.assign import Assignment
from a3b_quantize.decide import match
from a3b_quantize.file_types import FILE_TYPES
from a3b_quantize.policy import find_policy, recipe_policy
from a3b_quantize.policy_file import parse_policy
from a3b_quantize.recipe import load_recipe, names
from kin_headers import sparse_30b, sparse_80b, sparse_dense
from small_gguf import write_arrays
from true_header import sparse_35b

NORMS, CONV, NORMS_CONV = (f'[[rule]]\nroles = [{names}]\ntype = "f32"\n' for names in ('"norm"', '"conv"', '"norm", "conv"'))
HEAD = 'description = "test"\nfile_type = "iq4_nl"\n'


def assigned(model: Model, text: str) -> tuple[Assignment, ...]:
    return recipe_policy(parse_policy("test", text)).assign(model).assignments


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> list[Model]:
    folder = tmp_path_factory.mktemp("family")
    headers = [
        sparse_30b(folder / "30b.gguf", "bf16"),
        sparse_80b(folder / "80b.gguf", "bf16"),
        sparse_dense(folder / "dense.gguf", "bf16"),
    ]
    extra = {"blk.0.ffn_gate_up_exps.weight": np.zeros((2, 4, 256), np.float32), "rope_freqs.weight": np.zeros(32, np.float32)}
    return [open_gguf_model(path) for path in (tiny_bf16, *headers, write_arrays(folder / "extra.gguf", extra))]


@pytest.mark.parametrize("name", names())
def test_every_rule_has_work(family: list[Model], name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    assert recipe.file_type in FILE_TYPES
    unused = set(recipe.rules)
    for model in family:
        unused -= set(match(model, recipe.rules).types.values())
        assert len(find_policy(name).assign(model).assignments) == len(model.tensors)
    assert not unused


@pytest.mark.parametrize(
    ("name", "experts", "down", "rows"),
    [
        ("iq4_nl", "iq4_nl", "iq4_nl", "q6_k"),
        ("iq4_xs", "iq4_xs", "iq4_xs", "q6_k"),
        ("q3_k_m", "q3_k", "q4_k", "q6_k"),
        ("q4_k_m", "q4_k", "q4_k", "q6_k"),
        ("q5_k_m", "q5_k", "q5_k", "q6_k"),
        ("q6_k", "q6_k", "q6_k", "q6_k"),
        ("q8_0", "q8_0", "q8_0", "q8_0"),
        ("mxfp4_moe", "mxfp4", "mxfp4", "q8_0"),
    ],
)
def test_what_ours_gives_the_35b(tmp_path: Path, name: str, experts: str, down: str, rows: str) -> None:
    model = open_gguf_model(sparse_35b(tmp_path / "35b.gguf", "bf16", n_vocab=4096))
    assigned = {each.name: each.type.name for each in find_policy(name).assign(model).assignments}
    expected = {
        "blk.0.ffn_gate_exps.weight": experts, "blk.0.ffn_up_exps.weight": experts, "blk.39.ffn_down_exps.weight": down,
        "blk.0.attn_qkv.weight": "q8_0", "blk.0.attn_gate.weight": "q8_0", "blk.0.ssm_out.weight": "q8_0",
        "blk.3.attn_q.weight": "q8_0", "blk.3.attn_k.weight": "q8_0", "blk.3.attn_v.weight": "q8_0",
        "blk.3.attn_output.weight": "q8_0", "blk.3.ffn_down_shexp.weight": "q8_0",
        "token_embd.weight": rows, "output.weight": rows, "blk.0.ffn_gate_inp.weight": "f32", "blk.0.ffn_gate_inp_shexp.weight": "f32",
        "blk.0.attn_norm.weight": "f32", "blk.0.ssm_conv1d.weight": "f32", "blk.0.ssm_alpha.weight": "f32", "blk.0.ssm_beta.weight": "f32",
        "blk.0.ssm_a": "f32", "blk.0.ssm_dt.bias": "f32",
    }  # fmt: skip
    assert {tensor: assigned[tensor] for tensor in expected} == expected
    assert set(assigned.values()) == {experts, down, rows, "q8_0", "f32"}


def test_the_mtp_block_is_treated_like_the_trunk(tiny_bf16: Path) -> None:
    assigned = {each.name: each.type.name for each in find_policy("iq4_nl").assign(open_gguf_model(tiny_bf16)).assignments}
    for name, kind in assigned.items():
        if name.startswith("blk.4.") and "nextn" not in name:
            assert kind == assigned[name.replace("blk.4.", "blk.3.")], name
    assert assigned["blk.4.nextn.eh_proj.weight"] == "q8_0"


def one(name: str, shape: tuple[int, ...], tmp_path: Path, policy: str, pure: bool = False) -> Assignment:
    model = open_gguf_model(write_arrays(tmp_path / "one.gguf", {name: np.zeros(shape, np.float32)}))
    return find_policy(policy, pure=pure).assign(model).assignments[0]


@pytest.mark.parametrize(
    ("policy", "n_cols", "expected"),
    [
        ("q4_k_m", 320, "q5_0"),
        ("q4_k_m", 80, "f16"),
        ("iq4_nl", 320, "iq4_nl"),
        ("iq4_nl", 80, "f16"),
        ("q6_k", 96, "q8_0"),
        ("iq4_xs", 96, "iq4_nl"),
    ],
)
def test_rows_that_do_not_fit(tmp_path: Path, policy: str, n_cols: int, expected: str) -> None:
    each = one("blk.0.ffn_up_exps.weight", (2, 4, n_cols), tmp_path, policy)
    assert each.type.name == expected
    assert each.fell_back == (expected != policy)
    assert (f"rows of {n_cols} do not fit" in each.reason) == each.fell_back


def test_vectors_are_never_quantized(tmp_path: Path) -> None:
    for policy in ("iq4_nl", "q8_0"):
        for name, shape in (("blk.0.attn_q.bias", (256,)), ("blk.0.attn_q.weight", (1, 256))):
            assert one(name, shape, tmp_path, policy).type is TYPES["f32"]


def test_unknown_tensors_are_kept(tmp_path: Path) -> None:
    assert one("blk.0.something_new.weight", (4, 256), tmp_path, "iq4_nl").type is TYPES["f32"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "no rules"),
        ('file_type = "iq4"\n[[rule]]\nroles = ["router"]\ntype = "f32"', "file_type is 'iq4'"),
        ('file_type = []\n[[rule]]\nroles = ["router"]\ntype = "f32"', "file_type is []"),
        ('any_model = 1\n[[rule]]\nroles = ["router"]\ntype = "f32"', "any_model is 1"),
        (HEAD + "rule = 3", "has no rules"),
        (HEAD + "rule = [3]", "rule 1 is 3"),
        (HEAD + '[[rule]]\nname = 3\ntype = "f32"', "name is 3, expected a list"),
        (HEAD + '[[rule]]\nname = "*"', "neither type nor group_size"),
        (HEAD + '[[rule]]\nname = "*"\ngroup_size = 48', "group_size is 48, expected one of 32, 64, 128"),
        (HEAD + '[[rule]]\nname = "*"\ngroup_size = true', "group_size is True"),
        (HEAD + '[[rule]]\nlayers = "0-a"\ntype = "f32"', "rule 1: '0-a' are no layers"),
        (HEAD + '[[rule]]\nlayers = "last 0"\ntype = "f32"', "rule 1: 'last 0' are no layers"),
        (HEAD + '[[rule]]\nlayers = [1]\ntype = "f32"', "layers is [1], expected a text"),
        (HEAD + '[[rule]]\nregex = "(a"\ntype = "f32"', "is no regular expression"),
        (HEAD + '[[rule]]\nregex = 1\ntype = "f32"', "is no regular expression"),
        (HEAD + "nonsense = 1", "unknown key 'nonsense'"),
        (HEAD + '[[rule]]\nrole = ["router"]\ntype = "f32"', "rule 1: unknown key 'role'"),
        (HEAD + '[[rule]]\nroles = ["router"]\ntype = "f32"\n[[rule]]\nroles = ["rooter"]\ntype = "f32"', "rule 2: unknown role 'rooter'"),
        (HEAD + '[[rule]]\nroles = ["router"]\ntype = "q9_k"', "rule 1: unknown type 'q9_k'"),
        (HEAD + '[[rule]]\nroles = ["router"]\ntype = "q8_1"', "rule 1: unknown type 'q8_1'"),
        (HEAD + '[[rule]]\nroles = "router"\ntype = "f32"', "expected a list"),
        (HEAD + '[[rule]]\ntype = "f32"', "neither roles, layers, name nor regex"),
        (HEAD + '[[rule]]\nname = "*"\ntype = "f32"\n[[rule]]\nroles = ["norm"]\ntype = "f32"', "rule 2 can never match: rule 1"),
        (HEAD + NORMS_CONV + '[[rule]]\nroles = ["conv"]\nname = "x"\ntype = "f16"', "rule 2 can never match"),
        (HEAD + NORMS + CONV + '[[rule]]\nroles = ["conv", "norm"]\ntype = "f16"', "rule 3 can never match: rule 2"),
        (HEAD + "[[rule", "recipe test:"),
    ],
)  # fmt: skip
def test_bad_recipes_are_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_policy("test", text)
    assert said in caught.value.message


def test_a_tensor_without_a_rule_is_refused(tmp_path: Path) -> None:
    model = open_gguf_model(write_arrays(tmp_path / "one.gguf", {"output.weight": np.zeros((2, 32), np.float32)}))
    with pytest.raises(BadInput, match=r"no rule for tensor output\.weight of role output"):
        assigned(model, HEAD + 'any_model = true\n[[rule]]\nroles = ["norm"]\ntype = "f32"')


def test_the_first_rule_wins(tmp_path: Path) -> None:
    rules = '[[rule]]\nname = "blk.0.*"\ntype = "q8_0"\n[[rule]]\nroles = ["attention"]\ntype = "q4_0"'
    arrays = {f"blk.{i}.attn_v.weight": np.zeros((2, 32), np.float32) for i in range(2)}
    model = open_gguf_model(write_arrays(tmp_path / "two.gguf", arrays))
    assert [each.type.name for each in assigned(model, HEAD + rules)] == ["q8_0", "q4_0"]


@pytest.mark.parametrize(
    ("name", "stock", "said"),
    [
        ("iq4_ln", False, "did you mean iq4_nl?"),
        ("q5_k_s", False, "'q5_k_s' is a mixture of llama-quantize"),
        ("q8_1", False, "cannot write it"),
        ("nvfp4", True, "there is no 'nvfp4'"),
        ("iq4-xs", True, "did you mean iq4_xs?"),
    ],
)
def test_unknown_types(name: str, stock: bool, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_policy(name, stock)
    assert said in caught.value.message
    assert "iq4_nl" in caught.value.hint


def test_names_of_types_and_their_numbers() -> None:
    numbers = {"iq4_nl": 25, "q4_k_m": 15, "q8_0": 7, "q4_k": 14, "q5_k": 16, "q3_k": 11, "f16": 1, "bf16": 32, "mxfp4": 38, "nvfp4": 39}
    assert {name: find_policy(name).file_type for name in numbers} == numbers
    assert find_policy("Q4_K", stock=True).name == "stock:q4_k_m"  # llama-quantize's alias
    assert find_policy("q4_k").name == "q4_k"


def test_roles() -> None:
    assert set(ROLES) == {role for _, role in PATTERNS} | {"other"}
    assert role_of("blk.40.ffn_gate_exps.weight") == "expert_gate"
    assert role_of("blk.40.ffn_gate_exps.weight", n_layer=40) == "mtp"
    assert role_of("blk.39.ffn_gate_exps.weight", n_layer=40) == "expert_gate"
    assert role_of("blk.3.attn_qkv.weight") == "attention"  # a dense model's fused projection
    assert role_of("blk.3.attn_qkv.weight", recurrent=True) == "deltanet"
    assert role_of("v.blk.0.attn_q.weight") == "other"
