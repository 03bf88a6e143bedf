"""Policies: which rule decides about which tensor, in files and as flags, and what is said about a rule that does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.quantize import plan_quantize, quantize_file
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import TYPES, Model
from a3b_quantize.assign import Assignment
from a3b_quantize.policy import Choice, choose_policy
from a3b_quantize.policy_file import Recipe, format_policy, parse_policy, read_policy, write_policy
from a3b_quantize.recipe import POLICIES, load_policy, load_recipe, names
from a3b_quantize.rule import Rule, Subjects, layer_set
from command import assert_refused
from inside import inside as a3b
from kin_headers import sparse_30b
from small_gguf import narrow, write_arrays
from true_header import sparse_35b


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Path:
    return narrow(tiny_bf16, tmp_path_factory.mktemp("narrow") / "narrow-bf16.gguf", rows=4)


@pytest.fixture(scope="module")
def tiny(source: Path) -> Model:
    return open_gguf_model(source)


def decided(model: Model, type_name: str | None = "iq4_nl", **more: Any) -> dict[str, Assignment]:
    return {each.name: each for each in choose_policy(Choice(type_name, **more)).assign(model).assignments}


def from_file(model: Model, folder: Path, text: str, type_name: str | None = None) -> dict[str, Assignment]:
    path = folder / "own.toml"
    path.write_text(text)
    return decided(model, type_name, policy=str(path))


SUBJECTS = Subjects((), n_layer=40, n_all=41)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", [0]),
        ("0-3,36-39", [0, 1, 2, 3, 36, 37, 38, 39]),
        ("-1", [39]),
        ("-2--1", [38, 39]),
        ("37--1", [37, 38, 39]),
        ("first 2, last 2", [0, 1, 38, 39]),
        ("40", [40]),
    ],
)
def test_layers(text: str, layers: list[int]) -> None:
    assert layer_set(text, SUBJECTS, "x") == frozenset(layers)


@pytest.mark.parametrize("text", ["41", "3-2", "-41", "0-41", "5--40", "first 42"])
def test_layers_that_are_not_there(text: str) -> None:
    with pytest.raises(BadInput, match=r"the model has layers 0 to 39 and MTP behind them, up to 40"):
        layer_set(text, SUBJECTS, "x")


@pytest.mark.parametrize("text", ["a", "", "1-", "first", "first 0", "1,,2", "0..3"])
def test_what_are_no_layers(text: str) -> None:
    with pytest.raises(BadInput, match="are no layers"):
        layer_set(text, SUBJECTS, "x")


def test_rules_by_role_layer_and_name(tiny: Model, tmp_path: Path) -> None:
    rules = """
    base = "iq4_nl"
    [[rule]]
    name = "blk.2.ffn_down_exps.weight"
    type = "q6_k"
    [[rule]]
    roles = ["expert_down"]
    layers = "first 1, last 1"
    type = "q5_k"
    [[rule]]
    roles = ["mtp"]
    type = "q8_0"
    [[rule]]
    name = ["blk.1.ffn_up_exps.weight", "blk.3.attn_[kv].weight"]
    type = "bf16"
    [[rule]]
    regex = "^blk\\\\.0\\\\.ffn_(gate|up)_exps"
    type = "keep"
    """
    found = {name: each.type.name for name, each in from_file(tiny, tmp_path, rules).items()}
    expected = {
        "blk.0.ffn_down_exps.weight": "q5_k", "blk.1.ffn_down_exps.weight": "iq4_nl", "blk.2.ffn_down_exps.weight": "q6_k",
        "blk.3.ffn_down_exps.weight": "q5_k", "blk.4.ffn_down_exps.weight": "q8_0", "blk.4.ffn_up_exps.weight": "q8_0",
        "blk.4.attn_q.weight": "q8_0", "blk.4.nextn.eh_proj.weight": "q8_0", "blk.4.ffn_gate_inp.weight": "f32",
        "blk.4.attn_norm.weight": "f32", "blk.1.ffn_up_exps.weight": "bf16", "blk.3.attn_k.weight": "bf16", "blk.3.attn_q.weight": "q8_0",
        "blk.0.ffn_gate_exps.weight": "bf16", "blk.2.ffn_gate_exps.weight": "iq4_nl", "output.weight": "q6_k",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_type_and_group_size_are_decided_apart(tiny: Model, tmp_path: Path) -> None:
    rules = """
    [[rule]]
    roles = ["experts"]
    layers = "0-1"
    group_size = 64
    [[rule]]
    roles = ["expert_up"]
    group_size = 128
    """
    found = from_file(tiny, tmp_path, rules, "iq4_nl")
    sizes = {name: each.group_size for name, each in found.items() if each.group_size != 32}
    assert sizes == {f"blk.{i}.ffn_{part}_exps.weight": 64 for i in (0, 1) for part in ("gate", "up", "down")} | {
        f"blk.{i}.ffn_up_exps.weight": 128 for i in (2, 3, 4)
    }
    assert all(each.type.name == "iq4_nl" for name, each in found.items() if "_exps" in name)


def test_a_policy_without_base_needs_a_rule_for_every_tensor(tiny: Model, tmp_path: Path) -> None:
    experts = '[[rule]]\nroles = ["experts"]\ntype = "iq4_nl"\n'
    with pytest.raises(BadInput, match=r"no rule for tensor token_embd\.weight of role embedding"):
        from_file(tiny, tmp_path, experts)
    found = from_file(tiny, tmp_path, experts + '[[rule]]\nname = "*"\ntype = "keep"')
    assert {each.type.name for each in found.values()} == {"iq4_nl", "bf16", "f32"}


def test_what_the_file_says_it_is(tiny: Model, source: Path, tmp_path: Path) -> None:
    """general.file_type: what the policy says, else its base, else what most weights got."""
    rest = '[[rule]]\nroles = ["experts"]\ntype = "q5_k"\n[[rule]]\nname = "*"\ntype = "keep"'
    for text, type_name, number in (
        (f'file_type = "q6_k"\n{rest}', None, 18),
        (rest, None, 16),
        (f'base = "iq4_xs"\n{rest}', None, 30),
        (rest, "q8_0", 7),
    ):
        (tmp_path / "own.toml").write_text(text)
        policy = choose_policy(Choice(type_name, policy=str(tmp_path / "own.toml")))
        assert policy.number(policy.assign(tiny).assignments) == number, text
    done = quantize_file(source, tmp_path / "out.gguf", Options(None, policy=str(tmp_path / "own.toml"), bounds=False))
    assert read_gguf(done.path).get("a3b.recipe") == "own"
    assert done.policy == "own"


def test_a_policy_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rules = (
        Rule("", roles=frozenset(["expert_up", "mtp"]), layers="0-3,-1", type=TYPES["q5_k"], why='because "so"'),
        Rule("", names=("blk.0.attn_q.weight",), keep=True),
        Rule("", names=("a", "b*"), regex=r"\d", group_size=64),
    )
    policy = Recipe("own", "line\nwith é", "iq4_nl", rules, base="q4_k_m", any_model=True)
    write_policy(tmp_path / "own.toml", policy)
    again = read_policy(tmp_path / "own.toml")
    assert format_policy(again) == format_policy(policy)
    assert (again.name, again.description, again.file_type, again.base, again.any_model) == (
        "own",
        "line\nwith é",
        "iq4_nl",
        "q4_k_m",
        True,
    )
    for found, rule in zip(again.rules, rules, strict=True):
        assert (found.roles, found.layers, found.names, found.regex) == (rule.roles, rule.layers, rule.names, rule.regex)
        assert (found.type, found.keep, found.group_size, found.why) == (rule.type, rule.keep, rule.group_size, rule.why)


@pytest.mark.parametrize("name", [*names(), *names(POLICIES)])
def test_the_shipped_ones_come_back_too(name: str) -> None:
    policy = load_policy(name) if name in names(POLICIES) else load_recipe(name)
    assert format_policy(parse_policy(name, format_policy(policy))) == format_policy(policy)


def test_a_policy_for_hundreds_of_single_tensors(tmp_path: Path) -> None:
    """What an allocation writes: every expert tensor of the 35B by name, in one rule for each type."""
    model = open_gguf_model(sparse_35b(tmp_path / "35b.gguf", "bf16", n_vocab=4096))
    experts = [tensor.name for tensor in model.tensors if "_exps" in tensor.name]
    rules = tuple(Rule("", names=tuple(experts[i::3]), type=TYPES[kind]) for i, kind in enumerate(("iq4_xs", "q5_k", "q3_k")))
    write_policy(tmp_path / "own.toml", Recipe("own", "", "", rules, base="iq4_nl"))
    found = decided(model, None, policy=str(tmp_path / "own.toml"))
    assert [found[name].type.name for name in experts] == ["iq4_xs", "q5_k", "q3_k"] * 40
    assert found["output.weight"].type.name == "q6_k"


def test_the_write_up(tiny: Model, tmp_path: Path) -> None:
    found = decided(tiny, None, policy="write-up")
    expected = {
        "blk.0.ffn_gate_exps.weight": ("iq4_nl", 64), "blk.0.ffn_down_exps.weight": ("iq4_nl", 64),
        "blk.1.ffn_up_shexp.weight": ("iq4_nl", 64), "blk.3.attn_q.weight": ("iq4_nl", 128), "blk.0.attn_qkv.weight": ("iq4_nl", 128),
        "blk.0.ssm_out.weight": ("iq4_nl", 128), "blk.0.ffn_gate_inp.weight": ("f32", 32), "blk.0.attn_norm.weight": ("f32", 32),
        "token_embd.weight": ("q6_k", 32), "blk.0.ssm_alpha.weight": ("f32", 32),
    }  # fmt: skip
    assert {name: (found[name].type.name, found[name].group_size) for name in expected} == expected
    assert load_policy("policies/write-up.toml") == load_policy("write-up")
    qwen3 = decided(open_gguf_model(sparse_30b(tmp_path / "30b.gguf", "bf16")), None, policy="write-up")  # no DeltaNet, no shared expert
    assert qwen3["blk.0.attn_v.weight"].group_size == 128


def test_flags_come_first_and_the_first_flag_wins(tiny: Model) -> None:
    flags = (r"^blk\.0\.attn_qkv\.weight$=f16", "attn_qkv=q6_K", "OUTPUT|output=keep")
    found = {name: each.type.name for name, each in decided(tiny, tensor_types=flags).items()}
    assert (found["blk.0.attn_qkv.weight"], found["blk.1.attn_qkv.weight"], found["output.weight"]) == ("f16", "q6_k", "bf16")


@pytest.mark.parametrize(
    ("flag", "said", "hint"),
    [
        (r"blk\.\d+\.ATTN_K=q8_0", "matches no tensor: upper and lower case differ", "with other case it would match blk.3.attn_k.weight"),
        ("^attn_k=q8_0", "matches no tensor of this model", "blk.3.attn_k.weight"),
        ("attn_k$=q8_0", "matches no tensor of this model", "blk.3.attn_k.weight"),
        (r"attn_\D_norm\.bias=q8_0", "matches no tensor of this model", "blk."),
        ("ffn_dwn_exps=q5_k", "matches no tensor of this model", "blk.0.ffn_down_exps.weight"),
        ("xyzzy=q5_k", "matches no tensor of this model", "token_embd.weight"),
        ("attn_norm=q8_0", "is one-dimensional, never quantized, and nothing else matches", "leave the rule out"),
        (r"ffn_gate_inp\.weight=q8_0", "blk.0.ffn_gate_inp.weight is never quantized, and nothing else matches", "leave the rule out"),
        ("ssm_conv1d=q8_0", "blk.0.ssm_conv1d.weight is never quantized, and nothing else matches", "leave the rule out"),
        ("attn_k", "expected REGEX=TYPE", "q5_k"),
        ("=q8_0", "expected REGEX=TYPE", "q5_k"),
        ("(a=q8_0", "'(a' is no regular expression", "backslash"),
        ("attn_k=q9_0", "there is no type 'q9_0'", "q8_0"),
        ("attn_k=q8_1", "there is no type 'q8_1'; did you mean q8_0?", "keep"),
        ("attn_k=iq4_nl_m", "did you mean iq4_nl?", "keep"),
    ],
)
def test_tensor_types_that_do_nothing(tiny: Model, flag: str, said: str, hint: str) -> None:
    """R38 among them: llama-quantize lower-cases the whole pattern, here \\D stays what it is."""
    with pytest.raises(UsageError) as caught:
        decided(tiny, tensor_types=(flag,))
    assert caught.value.message.startswith(f"--tensor-type {flag}")
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_classes_keep_their_meaning(tiny: Model) -> None:
    found = decided(tiny, tensor_types=(r"attn_\D\.weight=q5_0", r"blk\.\d\.ffn_up_exps=q5_1"))
    assert {found[f"blk.3.attn_{part}.weight"].type.name for part in "qkv"} == {"q5_0"}
    assert found["blk.0.ffn_up_exps.weight"].type.name == "q5_1"


def test_a_flag_that_comes_too_late(tiny: Model) -> None:
    with pytest.raises(UsageError, match=r"--tensor-type attn_v=q4_0 changes nothing: --tensor-type attn_=q5_0 comes first") as caught:
        decided(tiny, tensor_types=("attn_=q5_0", "attn_v=q4_0"))
    assert "the first rule that matches wins" in caught.value.hint


def test_protected_tensors_among_others_are_said(tiny: Model) -> None:
    policy = choose_policy(Choice("iq4_nl", tensor_types=(r"blk\.1\.=q5_0",)))
    assigned = policy.assign(tiny)
    assert [note for note in assigned.notes if "does not reach" in note] == [
        r"--tensor-type blk\.1\.=q5_0 does not reach blk.1.ffn_gate_inp.weight and 1 more: it is never quantized"
    ]
    found = {each.name: each.type.name for each in assigned.assignments}
    assert (found["blk.1.ffn_gate_inp.weight"], found["blk.1.ssm_conv1d.weight"], found["blk.1.attn_norm.weight"]) == ("f32",) * 3
    assert found["blk.1.ssm_alpha.weight"] == "q5_0"  # not protected, as with llama-quantize


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("ffn", "expected ROLE=N"),
        ("fn=64", "there is no role 'fn'; did you mean ffn?"),
        ("ffn=48", "'48' is no group size"),
        ("ffn=", "'' is no group size"),
        ("attention=128", "changes nothing: blk.3.attn_q.weight is q8_0, and q8_0 blocks each have their own scale"),
        ("router=64", "changes nothing: blk.0.ffn_gate_inp.weight is f32"),
        ("dense_ffn=64", "matches no tensor of this model"),
    ],
)
def test_group_sizes_that_cannot_be(tiny: Model, flag: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        decided(tiny, group_sizes=(flag,))
    assert said in caught.value.message


def test_group_sizes_by_role(tiny: Model) -> None:
    policy = choose_policy(Choice("iq4_nl", tensor_types=("attn_q=iq4_nl",), group_sizes=("expert_gate=64", "attention=128", "router=32")))
    assigned = policy.assign(tiny)
    sizes = {each.name: each.group_size for each in assigned.assignments if each.group_size != 32}
    assert sizes["blk.0.ffn_gate_exps.weight"] == 64
    assert (sizes["blk.3.attn_q.weight"], sizes.get("blk.3.attn_k.weight")) == (128, None)
    assert any("--group-size attention=128: " in note and "keep a scale for each block" in note for note in assigned.notes)


def test_types_and_policies_that_do_not_go_together(tiny: Model) -> None:
    for choice, said in (
        (Choice(None), "--type or --policy is missing"),
        (Choice("q8_0", stock=True, pure=True), "--pure and --stock"),
        (Choice("q4_k_m", pure=True), "'q4_k_m' is a recipe, not a type"),
        (Choice(None, stock=True, policy="write-up"), "there is none"),
        (Choice("iq4_nl", policy="write-down"), "there is no file write-down; did you mean write-up?"),
    ):
        with pytest.raises(UsageError, match=said):
            choose_policy(choice)
    assert choose_policy(Choice("q4_k_m", stock=True, policy="write-up")).assign(tiny)


def test_a_base_that_is_none(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no 'iq5'"):
        from_file(tiny, tmp_path, 'base = "iq5"\n[[rule]]\nname = "*"\ntype = "keep"')


def test_what_a_run_says_about_its_flags(source: Path, tmp_path: Path) -> None:
    options = Options("iq4_nl", tensor_types=("attn_q=q5_0",), group_sizes=("experts=64",), bounds=False)
    done = quantize_file(source, tmp_path / "out.gguf", options)
    assert read_gguf(done.path).get("a3b.overrides") == ["tensor-type attn_q=q5_0", "group-size experts=64"]
    again = quantize_file(done.path, tmp_path / "again.gguf", Options("q8_0", bounds=False, allow_requantize=True))
    assert read_gguf(again.path).get("a3b.overrides") is None
    with pytest.raises(UsageError, match="ggml's kernels know only 32"):
        plan_quantize(source, tmp_path / "x.gguf", Options("iq4_nl", stock=True, group_sizes=("experts=64",)))


def test_scales_of_a_group_are_one(tmp_path: Path) -> None:
    """The first two bytes of the 18 of each block; a row's last group may be shorter."""
    values = np.random.default_rng(1).standard_normal((6, 5 * 32)).astype(np.float32)
    source = write_arrays(tmp_path / "one.gguf", {"blk.0.ffn_up.weight": values})
    for size, blocks in ((64, 2), (128, 4)):
        done = quantize_file(source, tmp_path / "out.gguf", Options("iq4_nl", bounds=False, group_sizes=(f"ffn={size}",)))
        raw = np.frombuffer(open_gguf_model(done.path).tensors[0].raw(0, 6), np.uint8).reshape(6, 5, 18)
        scales = raw[:, :, :2].copy().view(np.uint16)[:, :, 0]
        for start in range(0, 5, blocks):
            assert (scales[:, start : start + blocks] == scales[:, start : start + 1]).all()


def test_examples_of_the_page(tmp_path: Path) -> None:
    """The policy in docs/quantize.md is one, and does for the 35B what it says."""
    page = (Path(__file__).parent.parent / "docs" / "quantize.md").read_text()
    block = page.split("## Policy files\n\n")[1].split("\n\nRoles:")[0]
    model = open_gguf_model(sparse_35b(tmp_path / "35b.gguf", "bf16", n_vocab=4096))
    found = from_file(model, tmp_path, block.replace("    ", ""))
    experts = {i: found[f"blk.{i}.ffn_up_exps.weight"] for i in (0, 4, 7, 39)}
    assert {i: (each.type.name, each.group_size) for i, each in experts.items()} == {
        0: ("q6_k", 32), 4: ("iq4_xs", 32), 7: ("iq4_nl", 64), 39: ("q6_k", 32),
    }  # fmt: skip


def test_refusals_on_the_command_line(source: Path, tmp_path: Path) -> None:
    quantize = ("quantize", source, "-o", tmp_path / "out.gguf")
    (tmp_path / "bad.toml").write_text('[[rule]]\nroles = ["rooter"]\ntype = "f32"')
    assert_refused(a3b(*quantize, "--policy", tmp_path / "bad.toml"), 3, "bad.toml, rule 1: unknown role 'rooter'; did you mean router?")
    assert_refused(a3b(*quantize, "--policy", "none.toml"), 2, "there is no file none.toml", "shipped one: write-up")
    assert_refused(a3b(*quantize, "--policy", source), 3, "is not UTF-8 text")
    assert_refused(a3b(*quantize, "--type", "iq4_nl", "--tensor-type", "ATTN=q8_0"), 2, "upper and lower case differ")
    assert_refused(a3b(*quantize, "--type", "iq4_nl", "--effort", 4), 2, "--effort: there is no 4")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]
