"""`--set-kv` and `--type copy`: metadata changes, tensors do not; what the tensors contradict is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.quantize import plan_quantize, quantize_file
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.metadata import Field, boolean, f32, string, u32
from a3b_gguf.tensors import Model, n_rows
from a3b_quantize.set_kv import set_values
from command import assert_refused
from inside import inside as a3b
from kin_headers import sparse_dense
from small_gguf import write_arrays


def copy(**more: Any) -> Options:
    return Options("copy", bounds=False, **more)


@pytest.fixture(scope="module")
def model(tiny_bf16: Path) -> Model:
    return open_gguf_model(tiny_bf16)


def tensor_bytes(path: Path) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.raw(0, n_rows(tensor.shape))) for tensor in open_gguf_model(path).tensors}


def test_a_copy_is_the_same_file(tiny_bf16: Path, tmp_path: Path) -> None:
    done = quantize_file(tiny_bf16, tmp_path / "copy.gguf", copy())
    assert done.path.read_bytes() == tiny_bf16.read_bytes()
    assert all(share.type in ("bf16", "f32") for share in done.shares)


@pytest.mark.parametrize("kind", ["iq4_nl", "q4_k_m"])
def test_a_quantized_file_is_copied_split_and_merged(tiny_bf16: Path, tmp_path: Path, kind: str) -> None:
    quantized = quantize_file(tiny_bf16, tmp_path / "q.gguf", Options(kind, bounds=False)).path
    split = quantize_file(quantized, tmp_path / "split.gguf", copy(max_shard_bytes=3_000_000))
    assert len(split.files) > 2
    assert quantize_file(split.path, tmp_path / "merged.gguf", copy()).path.read_bytes() == quantized.read_bytes()


def test_what_is_set(tiny_bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ 'é' }}\n")
    settings = {
        "general.name": ("My model = mine", Field("str", "My model = mine")),
        "qwen35moe.context_length": ("4096", u32(4096)),
        "qwen35moe.rope.freq_base": ("5e6", f32(5e6)),
        "tokenizer.ggml.add_bos_token": ("TRUE", boolean(True)),
        "tokenizer.chat_template": (f"@{tmp_path / 'template.jinja'}", string("{{ 'é' }}\n")),
        "qwen35moe.rope.dimension_sections": ("[4, 2, 2, 0]", Field("arr", [4, 2, 2, 0], "i32")),
        "general.tags": ('str:["a"]', string('["a"]')),
        "qwen35moe.expert_weights_scale": ("2", f32(2)),  # llama.cpp would not load a u32 here
        "general.author": ("42", string("42")),
        "my.count": ("7", u32(7)),
        "qwen35moe.attention.layer_norm_rms_epsilon": ("float:0.5", f32(0.5)),
        "my.int": ("int:8", u32(8)),
        "my.string": ("string:8", string("8")),
        "my.offset": ("-7", Field("i32", -7)),
        "my.large": ("5000000000", Field("u64", 5_000_000_000)),
        "my.share": ("0.5", f32(0.5)),
        "my.flag": ("false", boolean(False)),
        "my.text": ("u33:x", string("u33:x")),
        "my.byte": ("u8:200", Field("u8", 200)),
        "my.word": ("str:12", string("12")),
    }
    done = quantize_file(tiny_bf16, tmp_path / "out.gguf", copy(set_kv=tuple(f"{key}={text}" for key, (text, _) in settings.items())))
    before, after = read_gguf(tiny_bf16, arrays=True).metadata, read_gguf(done.path, arrays=True).metadata
    assert {key: after[key] for key in settings} == {key: field for key, (_, field) in settings.items()}
    assert {key: value for key, value in after.items() if key not in settings} == {
        key: value for key, value in before.items() if key not in settings
    }
    assert list(after)[: len(before)] == list(before)
    assert "--set-kv: my.count is new, written as u32" in done.notes
    assert not any("my.byte" in note for note in done.notes)
    assert tensor_bytes(done.path) == tensor_bytes(tiny_bf16)


def test_llama_cpp_sees_it(tiny_bf16: Path, tmp_path: Path) -> None:
    done = quantize_file(tiny_bf16, tmp_path / "out.gguf", copy(set_kv=("qwen35moe.context_length=512",)))
    with load_model(done.path, LoadParams(n_ctx=256)) as loaded:
        assert loaded.n_ctx_train == 512


def test_it_goes_with_quantizing_too(tiny_bf16: Path, tmp_path: Path) -> None:
    plain = quantize_file(tiny_bf16, tmp_path / "plain.gguf", Options("q8_0", bounds=False)).path
    done = quantize_file(tiny_bf16, tmp_path / "out.gguf", Options("q8_0", bounds=False, set_kv=("general.name=X",), experts=1))
    assert tensor_bytes(done.path) == tensor_bytes(plain)
    assert (read_gguf(done.path).get("general.name"), read_gguf(done.path).hparam("expert_used_count")) == ("X", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("general.name", "expected KEY=VALUE"),
        ("=x", "expected KEY=VALUE"),
        ("general name=x", "expected KEY=VALUE"),
        ("general.nam=x", "the model has no such key; did you mean general.name?"),
        ("qwen35moe.expert_used_cout=2", "did you mean qwen35moe.expert_used_count?"),
        ("qwen35moe.context_length=4k", "'4k' is no u32: expected a whole number"),
        ("qwen35moe.context_length=-1", "'-1' is no u32: expected 0 to 4294967295"),
        ("qwen35moe.context_length=i32:5", "the key is u32, not i32"),
        ("qwen35moe.context_length=float:5", "the key is u32, not float"),
        ("qwen35moe.rope.freq_base=fast", "'fast' is no f32"),
        ("qwen35moe.rope.freq_base=nan", "'nan' is no f32: it is not finite"),
        ("qwen35moe.rope.freq_base=1e39", "'1e39' is no f32: it is not finite"),
        ("tokenizer.ggml.add_bos_token=1", "'1' is no bool: expected true or false"),
        ("qwen35moe.rope.dimension_sections=4", "the key is an array of i32, the value is none"),
        ("qwen35moe.rope.dimension_sections=[1,", "the key is an array of i32"),
        ("qwen35moe.rope.dimension_sections=[1.5]", "'1.5' is no i32"),
        ("my.byte=u8:300", "'300' is no u8: expected 0 to 255"),
        ("my.byte=i8:-129", "'-129' is no i8: expected -128 to 127"),
        ("tokenizer.ggml.tokens=[]", "the vocabulary belongs to the rows of the embeddings"),
        ("general.architecture=llama", "the tensors are those of qwen35moe"),
        ("tokenizer.ggml.bos_token_id=4096", "the vocabulary has the tokens 0 to 4,095"),
        ("split.count=2", "a3b writes this key itself"),
        ("general.alignment=u32:64", "a3b writes this key itself"),
        ("qwen35moe.block_count=3", "the file has 5 blocks, and layers of a hybrid cannot be pruned: DeltaNet and attention layers"),
        ("qwen35moe.nextn_predict_layers=0", "the tensors say 1"),
        ("qwen35moe.expert_count=16", "the tensors say 8"),
        ("qwen35moe.embedding_length=64", "the tensors say 256"),
        ("qwen35moe.expert_feed_forward_length=7", "the tensors say 256"),
        ("qwen35moe.expert_used_count=9", "a token can use 1 to 8 experts"),
        ("qwen35moe.attention.head_count=8", "it says what shape the tensors have"),
        ("qwen35moe.ssm.state_size=8", "it says what shape the tensors have"),
        ("qwen35moe.full_attention_interval=2", "what a layer is"),
        ("qwen35moe.attention.recurrent_layers=[true, true, true, true, true]", "what a layer is"),
    ],
)
def test_what_cannot_be_set(model: Model, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        set_values(model, [text])
    assert said in caught.value.message


def test_the_same_value_may_be_set(model: Model) -> None:
    kept = [
        "qwen35moe.block_count=5",
        "qwen35moe.attention.head_count=4",
        "general.architecture=qwen35moe",
        "qwen35moe.expert_used_count=2",
    ]
    assert set_values(model, kept).metadata == model.metadata


def test_a_key_twice(model: Model) -> None:
    with pytest.raises(UsageError, match=r"--set-kv general\.name is given twice"):
        set_values(model, ["general.name=a", "general.name=b"])


def test_a_false_claim_is_mended(model: Model) -> None:
    """A file that claims an MTP block which is not there: the tensors decide, so the claim may be taken back."""
    trunk = tuple(tensor for tensor in model.tensors if not tensor.name.startswith("blk.4."))
    broken = replace(model, tensors=trunk)
    mended = set_values(broken, ["qwen35moe.block_count=4", "qwen35moe.nextn_predict_layers=0"])
    assert (mended.metadata["qwen35moe.block_count"], mended.metadata["qwen35moe.nextn_predict_layers"]) == (u32(4), u32(0))


def test_layers_of_a_dense_model(tmp_path: Path) -> None:
    model = open_gguf_model(sparse_dense(tmp_path / "dense.gguf", "bf16"))
    arch = model.architecture
    with pytest.raises(UsageError, match="layers cannot be pruned by their count"):
        set_values(model, [f"{arch}.block_count=1"])


def test_files_that_are_not_there(model: Model, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.chat_template: .*no.jinja: No such file"):
        set_values(model, [f"tokenizer.chat_template=@{tmp_path / 'no.jinja'}"])
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="not UTF-8"):
        set_values(model, [f"tokenizer.chat_template=@{tmp_path / 'bad.jinja'}"])


def test_bad_weights_are_not_copied(tmp_path: Path) -> None:
    values = np.ones((4, 300, 64), np.float32)
    values[2, 123, 7] = np.inf
    source = write_arrays(tmp_path / "bad.gguf", {"blk.0.ffn_up_exps.weight": values}, kind="f16")
    with pytest.raises(BadInput, match=r"blk\.0\.ffn_up_exps\.weight, expert 2 of 4, row 123, column 7: the weight is inf"):
        quantize_file(source, tmp_path / "out.gguf", copy())
    good = quantize_file(write_arrays(tmp_path / "good.gguf", {"output.weight": np.ones((2, 64), np.float32)}), tmp_path / "q.gguf",
                         Options("q8_0", bounds=False)).path  # fmt: skip
    data = bytearray(good.read_bytes())
    start = read_gguf(good).tensors[0].offset
    data[start : start + 2] = b"\xff\x7f"  # the first block's scale becomes NaN
    good.write_bytes(data)
    with pytest.raises(BadInput, match=r"output\.weight: a q8_0 block has a scale that cannot be"):
        quantize_file(good, tmp_path / "out.gguf", copy())


def test_copying_with_another_type_for_one_tensor(tiny_bf16: Path, tmp_path: Path) -> None:
    """All others stay; from a quantized file the one that changes needs permission."""
    quantized = quantize_file(tiny_bf16, tmp_path / "q.gguf", Options("iq4_nl", bounds=False)).path
    options = copy(tensor_types=("^output=q8_0",))
    with pytest.raises(BadInput, match=r"tensor output\.weight is q6_k: the source is quantized already"):
        quantize_file(quantized, tmp_path / "out.gguf", options)
    done = quantize_file(quantized, tmp_path / "out.gguf", replace(options, allow_requantize=True))
    before, after = tensor_bytes(quantized), tensor_bytes(done.path)
    assert {name for name in before if before[name] != after[name]} == {"output.weight"}
    assert read_gguf(done.path).get("a3b.overrides") == ["tensor-type ^output=q8_0"]
    assert read_gguf(done.path).get("a3b.recipe") == "iq4_nl"


def test_flags_that_do_not_go_with_copy(tiny_bf16: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an importance matrix has no use"):
        plan_quantize(tiny_bf16, tmp_path / "out.gguf", copy(imatrix=tmp_path / "imatrix.gguf"))
    for options in (copy(stock=True), copy(policy="write-up"), copy(pure=True)):
        with pytest.raises(UsageError, match="do not go together"):
            plan_quantize(tiny_bf16, tmp_path / "out.gguf", options)


def test_refusals_on_the_command_line(tiny_bf16: Path, tmp_path: Path) -> None:
    copying = ("quantize", tiny_bf16, "--type", "copy", "--no-bounds", "-o", tmp_path / "out.gguf")
    assert_refused(a3b(*copying, "--set-kv", "qwen35moe.block_count=3"), 2, "layers of a hybrid cannot be pruned")
    assert_refused(a3b(*copying, "--prune-layers", "2,3"), 2, "layers are not pruned", "--prune-experts")
    assert_refused(a3b(*copying, "--set-kv", "general.nmae=x"), 2, "did you mean general.name?", "general.nmae=str:")
    assert not list(tmp_path.iterdir())
