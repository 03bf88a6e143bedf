"""What differs between the architectures, and between the layouts in which people publish one. R numbers: reports of real conversions."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_convert import open_checkpoint, prepare
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.tensors import Model, TensorSource, n_rows
from command import assert_refused
from inside import inside as a3b
from kin_headers import SMALL_VOCAB, sparse_30b, sparse_80b
from sparse import sparse_safetensors, unpacked
from tiny import (
    NESTED,
    Edit,
    Form,
    Sizes,
    Weights,
    all_shapes,
    bf16_rounded,
    config_json,
    is_zero_centred,
    per_expert,
    tokenizer_json,
    weights,
    write_checkpoint,
)

PLAIN = ("qwen3moe", "qwen3vlmoe")
HYBRIDS = ("qwen35moe", "qwen3next")
ALL, SMALL = Sizes(), Sizes(n_layer=1)


def bytes_of(tensor: TensorSource) -> bytes:
    return bytes(tensor.raw(0, n_rows(tensor.shape)))


def opened(folder: Path, form: Form, sizes: Sizes = ALL, edit: Edit | None = None) -> Model:
    return open_checkpoint(write_checkpoint(folder / "tiny", form, sizes, edit=edit))


def refusal(folder: Path, form: Form, sizes: Sizes = ALL, edit: Edit | None = None) -> BadInput:
    with pytest.raises(BadInput) as caught:
        opened(folder, form, sizes, edit)
    return caught.value


def same(one: Model, other: Model, but: tuple[str, ...] = ()) -> None:
    """Both have the same tensors, byte by byte; of those that end with `but` only name and shape are compared."""
    assert [(tensor.name, tensor.shape) for tensor in one.tensors] == [(tensor.name, tensor.shape) for tensor in other.tensors]
    for ours, theirs in zip(one.tensors, other.tensors, strict=True):
        assert ours.name.endswith(but) if but and ours.name.endswith(but) else bytes_of(ours) == bytes_of(theirs), ours.name


def form_of(arch: str, **how: Any) -> Form:
    return Form(**{"arch": arch, "mtp": False, "nested": arch in NESTED, **how})


@pytest.mark.parametrize("arch", [*PLAIN, *HYBRIDS])
def test_r40_the_second_norm_has_the_name_that_its_architecture_reads(tmp_path: Path, arch: str) -> None:
    names = {tensor.name for tensor in opened(tmp_path, form_of(arch)).tensors}
    assert ("blk.0.ffn_norm.weight" in names) == (arch in PLAIN)
    assert ("blk.0.post_attention_norm.weight" in names) == (arch in HYBRIDS)


@pytest.mark.parametrize("arch", [*PLAIN, *HYBRIDS])
def test_r15_one_is_added_to_the_norms_that_need_it_and_to_no_others(tmp_path: Path, arch: str) -> None:
    model = opened(tmp_path, form_of(arch), Sizes(n_layer=4))
    found = {tensor.name: tensor.rows(0, n_rows(tensor.shape)) for tensor in model.tensors}
    source = weights(Sizes(n_layer=4), mtp=False, arch=arch)
    for ours, theirs in {"attn_norm": "input_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}.items():
        wanted = source[f"model.layers.3.{theirs}.weight"] + np.float32(arch in HYBRIDS)
        np.testing.assert_array_equal(found[f"blk.3.{ours}.weight"].ravel(), wanted)
    if arch in HYBRIDS:
        np.testing.assert_array_equal(found["blk.0.ssm_norm.weight"].ravel(), source["model.layers.0.linear_attn.norm.weight"])


@pytest.mark.parametrize("pairs", [4, 8, 12])
def test_r16_without_mrope_section_the_pairs_take_turns(tmp_path: Path, pairs: int) -> None:
    """So that llama.cpp rotates every pair: [11, 11, 10] of 32 pairs, [2, 1, 1] of 4, always four values."""

    def edit(values: Weights, config: dict[str, Any]) -> None:
        del config["rope_parameters"]["mrope_section"]

    sizes = Sizes(n_layer=4, head=8 * pairs)
    found = opened(tmp_path, Form(), sizes, edit).metadata["qwen35moe.rope.dimension_sections"].value
    assert found == {4: [2, 1, 1, 0], 8: [3, 3, 2, 0], 12: [4, 4, 4, 0]}[pairs]


@pytest.mark.parametrize("arch", [*PLAIN, *HYBRIDS])
def test_r19_no_size_is_guessed(tmp_path: Path, arch: str) -> None:
    """Each size that transformers has a default for must stand in config.json."""
    needed = ["head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_key_value_heads", "rms_norm_eps"]
    needed += ["linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"] if arch in HYBRIDS else []
    for number, key in enumerate(needed):

        def edit(values: Weights, config: dict[str, Any], key: str = key) -> None:
            config.get("text_config", config).pop(key)

        assert f"key {key} is missing" in refusal(tmp_path / str(number), form_of(arch), SMALL, edit).message


def test_experts_are_counted_under_the_name_that_transformers_5_saves(tmp_path: Path) -> None:
    def edit(values: Weights, config: dict[str, Any]) -> None:
        config["num_local_experts"] = config.pop("num_experts")

    assert opened(tmp_path, form_of("qwen3moe"), SMALL, edit).metadata["qwen3moe.expert_count"].value == 4


@pytest.mark.parametrize(("value", "said"), [(None, "key norm_topk_prob is missing"), (False, "key norm_topk_prob is false")])
def test_experts_whose_weights_are_not_normalized_are_refused(tmp_path: Path, value: bool | None, said: str) -> None:
    """llama.cpp always normalizes; transformers does for this class only when it is told."""
    assert said in refusal(tmp_path, form_of("qwen3moe"), SMALL, lambda values, config: config.update(norm_topk_prob=value)).message


def test_sections_of_qwen3_vl_are_needed_and_add_up(tmp_path: Path) -> None:
    def edit(found: object) -> Edit:
        return lambda values, config: config["text_config"]["rope_scaling"].update(mrope_section=found)

    form = form_of("qwen3vlmoe", turned=True)
    assert "key rope_scaling.mrope_section is missing" in refusal(tmp_path / "a", form, SMALL, edit(None)).message
    assert (
        "mrope_section is [6, 5], expected up to 4 numbers that add up to 16" in refusal(tmp_path / "b", form, SMALL, edit([6, 5])).message
    )


@pytest.mark.parametrize("arch", [*PLAIN, *HYBRIDS])
@pytest.mark.parametrize("ff", [32, 48, 64], ids=["hidden = 2 ff", "", "hidden = ff"])
def test_r6_transposed_experts_are_known_by_their_shape(tmp_path: Path, arch: str, ff: int) -> None:
    sizes = Sizes(n_layer=1, ff=ff)
    straight, turned = (opened(tmp_path / str(how), form_of(arch, turned=how), sizes) for how in (False, True))
    same(straight, turned)
    for one, other in zip(straight.tensors, turned.tensors, strict=True):
        total = n_rows(one.shape)
        cuts = [(start, min(start + 7, total)) for start in range(0, total, 7)]
        halfway = [bytes(other.raw(start, start + 1)) for start in (0, total // 2, total - 1, 0)]  # each in another expert
        assert halfway == [bytes(one.raw(start, start + 1)) for start in (0, total // 2, total - 1, 0)]
        with ThreadPoolExecutor(4) as pool:
            pieces = list(pool.map(lambda cut, tensor=other: bytes(tensor.raw(*cut)), cuts))
        assert b"".join(pieces) == bytes_of(one), one.name


@pytest.mark.parametrize("arch", [*PLAIN, *HYBRIDS])
def test_r6_two_readings_are_refused_and_both_named(tmp_path: Path, arch: str) -> None:
    """hidden = 2 ff, and no packed down_proj whose shape would tell."""

    def edit(values: Weights, config: dict[str, Any]) -> None:
        name = next(name for name in values if name.endswith("experts.down_proj"))
        values.update(per_expert(name, values.pop(name)))

    said = refusal(tmp_path, form_of(arch), SMALL, edit).message
    assert "experts.gate_up_proj has shape [4, 64, 64], which can be read as" in said
    assert "from [experts 4, gate_up 64, hidden 64]" in said
    assert "from [experts 4, hidden 64, gate_up 64]" in said


def test_experts_half_packed_are_read(tmp_path: Path) -> None:
    def edit(values: Weights, config: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.experts.down_proj"
        values.update(per_expert(name, values.pop(name)))

    form, sizes = form_of("qwen3moe"), Sizes(n_layer=1, ff=48)
    same(opened(tmp_path / "a", form, sizes), opened(tmp_path / "b", form, sizes, edit))


def test_nan_in_a_transposed_expert_is_named_where_it_lies(tmp_path: Path) -> None:
    def edit(values: Weights, config: dict[str, Any]) -> None:
        values["model.language_model.layers.0.mlp.experts.gate_up_proj"][2, 40, 3] = np.nan

    model = opened(tmp_path, form_of("qwen3vlmoe", turned=True), SMALL, edit)
    with pytest.raises(BadInput, match="gate_up_proj, expert 2, row 40, column 3 is NaN or infinite"):
        [bytes_of(tensor) for tensor in model.tensors]


@pytest.mark.parametrize("arch", [*PLAIN, *HYBRIDS])
def test_r5_what_mlx_saved_is_the_same_model(tmp_path: Path, arch: str) -> None:
    """Names of the experts, the convolutions' shape, and norms that have their 1 already: rounded to bf16 with it, not added again."""
    plain, mlx = (opened(tmp_path / str(how), form_of(arch, mlx=how)) for how in (False, True))
    added = ("attn_norm.weight", "attention_norm.weight", "q_norm.weight", "k_norm.weight", "output_norm.weight") if arch in HYBRIDS else ()
    same(plain, mlx, added)
    for one, other in zip(plain.tensors, mlx.tensors, strict=True):
        if added and one.name.endswith(added):
            np.testing.assert_array_equal(other.rows(0, 1), bf16_rounded(one.rows(0, 1)))
    assert any("stored as 1 + w, as MLX does (1.0" in note for note in mlx.notes) == (arch in HYBRIDS)
    assert not any("1 + w" in note for note in plain.notes)


def shifted(by: float, only: str = "", conv: bool = False) -> Edit:
    """Adds to the norms whose names begin with `only`; conv: moves the first convolution as MLX does."""

    def edit(values: Weights, config: dict[str, Any]) -> None:
        for name, value in values.items():
            if name.startswith(only) and is_zero_centred(name):
                values[name] = value + np.float32(by)
        if conv:
            name = "model.layers.0.linear_attn.conv1d.weight"
            values[name] = np.ascontiguousarray(np.moveaxis(values[name], 2, 1))

    return edit


@pytest.mark.parametrize("arch", HYBRIDS)
def test_norms_and_convolutions_that_contradict_each_other_are_refused(tmp_path: Path, arch: str) -> None:
    said = refusal(tmp_path / "a", form_of(arch, nested=False), edit=shifted(1)).message
    assert "conv1d.weight has shape [128, 1, 4], as the original has it, but the norms are 1.0" in said
    assert "as if they were stored as 1 + w" in said
    said = refusal(tmp_path / "b", form_of(arch, nested=False, mlx=True), edit=shifted(-1)).message
    assert "conv1d.weight has shape [128, 4, 1], as MLX has it, but the norms are 0.0" in said.replace("-0.0", "0.0")
    said = refusal(tmp_path / "c", form_of(arch, nested=False), edit=shifted(0, conv=True)).message
    assert "layers.2.linear_attn.conv1d.weight has the original's shape, model.layers.0.linear_attn.conv1d.weight has MLX's" in said


@pytest.mark.parametrize("arch", HYBRIDS)
def test_an_mtp_block_grafted_onto_what_mlx_saved_is_judged_by_its_own_norms(tmp_path: Path, arch: str) -> None:
    name = "blk.4.nextn.enorm.weight"
    plain = opened(tmp_path / "a", Form(arch=arch))
    wanted = next(tensor for tensor in plain.tensors if tensor.name == name).rows(0, 1)
    grafted = opened(tmp_path / "b", Form(arch=arch, mlx=True), edit=shifted(-1, "mtp."))
    np.testing.assert_allclose(next(tensor for tensor in grafted.tensors if tensor.name == name).rows(0, 1), wanted, atol=0.005)
    assert any("those of the MTP block are not" in note for note in grafted.notes)
    saved = opened(tmp_path / "c", Form(arch=arch, mlx=True))
    np.testing.assert_allclose(next(tensor for tensor in saved.tensors if tensor.name == name).rows(0, 1), wanted, atol=0.005)
    said = refusal(tmp_path / "d", Form(arch=arch, mlx=True), edit=shifted(-0.5, "mtp."))
    assert "those of the MTP block are 0.5" in said.message
    assert "--no-mtp" in said.hint


def test_mtp_is_told_from_tensors_where_config_never_speaks_of_it(tmp_path: Path) -> None:
    model = opened(tmp_path, Form(arch="qwen3next"))
    assert model.metadata["qwen3next.nextn_predict_layers"].value == 1
    assert "the checkpoint has 1 MTP block, config.json says nothing of it: the tensors were believed" in model.notes


def test_a_draft_needs_an_mtp_block(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(arch="qwen3moe", mtp=False), SMALL)
    with pytest.raises(BadInput, match="tiny has no mtp.* tensors: there is no MTP block to write"):
        prepare(folder, mtp="only")
    both = a3b("convert", folder, "--mtp-only", "--no-mtp", cwd=tmp_path)
    assert_refused(both, 2, "--mtp-only and --no-mtp together leave nothing to write")
    done = a3b("convert", write_checkpoint(tmp_path / "draft", Form()), "--mtp-only", cwd=tmp_path)
    assert done.stdout.startswith("mtp-draft-BF16.gguf: qwen35moe, 23 tensors"), done.stderr
    named = prepare(write_checkpoint(tmp_path / "whole" / "tiny", Form()), mtp="only")
    assert [file.path.name for file in named.files] == ["mtp-tiny-BF16.gguf"]
    assert {line.name.partition(".")[0] for line in named.tensors} == {"token_embd", "output_norm", "output", "blk"}


@pytest.mark.parametrize(
    ("arch", "sizes", "header"),
    [
        ("qwen3moe", Sizes(2048, 32, 4, 128, n_layer=48, n_expert=128, n_used=8, ff=768, vocab=SMALL_VOCAB), sparse_30b),
        ("qwen3next", Sizes(2048, 16, 2, 256, 16, 32, 128, 4, 48, 512, 10, 512, 512, SMALL_VOCAB), sparse_80b),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_true_widths(tmp_path: Path, arch: str, sizes: Sizes, header: Callable[..., Path], packed: bool) -> None:
    """Names and shapes of Qwen3-30B-A3B and Qwen3-Next-80B-A3B, from sparse checkpoints with their sizes and a small vocabulary."""
    form = form_of(arch)
    folder = write_checkpoint(tmp_path / "tiny", form, SMALL, edit=lambda values, config: config.update(config_json(sizes, form)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(sizes.vocab)))
    shapes = {name: shape for name, shape in all_shapes(sizes, arch).items() if not name.startswith("mtp.")}
    sparse_safetensors(folder / "model.safetensors", shapes if packed else dict(chain.from_iterable(map(unpacked, shapes.items()))))
    published = {tensor.name: tensor.shape for tensor in read_gguf(header(tmp_path / "x.gguf", "bf16", SMALL_VOCAB)).tensors}
    gates = {name: (1, 2048) for name in published if name.endswith("ffn_gate_inp_shexp.weight")}  # as llama.cpp's converter writes them
    assert {line.name: line.shape for line in prepare(folder).tensors} == published | gates


@pytest.mark.parametrize("prefix", ["model.mtp.", "language_model.mtp."])
def test_the_mtp_block_is_known_under_its_other_names(tmp_path: Path, prefix: str) -> None:
    def edit(values: Weights, config: dict[str, Any]) -> None:
        for name in [name for name in values if name.startswith("mtp.")]:
            values[prefix + name.removeprefix("mtp.")] = values.pop(name)

    same(opened(tmp_path / "a", Form()), opened(tmp_path / "b", Form(), edit=edit))
    without = open_checkpoint(tmp_path / "b" / "tiny", mtp=False)
    assert not any("nextn" in tensor.name for tensor in without.tensors)
