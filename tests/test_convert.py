"""a3b convert: the same tensors and metadata as llama.cpp's own converter, in every form of checkpoint and in every type."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from a3b_convert import Converted, convert, open_checkpoint, prepare
from a3b_convert.archs import ARCHS
from a3b_convert.archs.base import Either, Row
from a3b_convert.config import read_config
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import header
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.metadata import Metadata
from a3b_gguf.tensors import Model, TensorSource, n_rows
from forms import DRAFTS, FORMS
from golden_files import GOLDEN, read_golden
from sparse import sparse_safetensors, unpacked
from tiny import NESTED, Form, Sizes, all_shapes, config_json, in_form, tokenizer_json, weights, write_checkpoint
from true_header import tensors_35b

SCRIPT = "convert_vendored.py SDIST"
INLINE = 64
ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")
GOLDEN_FORMS: dict[str, Any] = json.loads((GOLDEN / "convert_forms.json").read_text(encoding="utf-8"))


def bytes_of(tensor: TensorSource) -> bytes:
    return bytes(tensor.raw(0, n_rows(tensor.shape)))


def values_of(tensor: TensorSource) -> np.ndarray:
    return tensor.rows(0, n_rows(tensor.shape)).reshape(tensor.shape)


def digests(model: Model) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """name -> type, shape, sha256 of each tensor."""
    return {tensor.name: (tensor.type.name, tensor.shape, hashlib.sha256(bytes_of(tensor)).hexdigest()) for tensor in model.tensors}


def converted(folder: Path, **options: Any) -> tuple[Model, Converted]:
    """The checkpoint as a file beside it, read again."""
    path = folder.with_suffix(".gguf")
    done = convert(folder, path, **options)
    assert done.n_bytes == path.stat().st_size == prepare(folder, **options).n_bytes
    return open_gguf_model(path), done


def assert_tensors(model: Model, theirs: dict[str, Any], leave_out: Callable[[str], bool] = lambda name: False) -> None:
    """The model's tensors are `theirs`, byte by byte; ssm_a within a unit in the last place, since exp() may differ by one."""
    assert {tensor.name for tensor in model.tensors} == theirs.keys()
    for tensor in model.tensors:
        golden = theirs[tensor.name]
        assert (tensor.type.name, list(tensor.shape)) == (golden["type"], golden["shape"]), tensor.name
        if leave_out(tensor.name):
            continue
        if "values" in golden:
            np.testing.assert_array_max_ulp(values_of(tensor), np.array(golden["values"], np.float32), maxulp=1)
        else:
            assert hashlib.sha256(bytes_of(tensor)).hexdigest() == golden["sha256"], tensor.name


def described(metadata: Metadata) -> dict[str, Any]:
    """Metadata as the goldens keep it: a long array by its count and hash."""
    out: dict[str, Any] = {}
    for key, field in metadata.items():
        out[key] = {"kind": field.kind, "item": field.item}
        if isinstance(field.value, list) and len(field.value) > INLINE:
            out[key] |= {"count": len(field.value), "sha256": hashlib.sha256(json.dumps(field.value).encode()).hexdigest()}
        else:
            out[key]["value"] = field.value
    return out


@pytest.mark.parametrize("float_type", ["bf16", "f32"])
def test_embedded_model_is_what_llama_cpp_makes_of_it(tiny_checkpoint: Path, tmp_path: Path, float_type: str) -> None:
    golden = read_golden("convert_tiny_a3b.json", SCRIPT, tiny_checkpoint)
    convert(tiny_checkpoint, tmp_path / "x.gguf", float_type=float_type)
    model = open_gguf_model(tmp_path / "x.gguf")
    assert_tensors(model, golden[float_type])
    ours = described(model.metadata)
    assert ours == golden[f"metadata_{float_type}"]
    assert list(ours) == list(golden[f"metadata_{float_type}"])


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_what_llama_cpp_makes_of_it(tmp_path: Path, name: str) -> None:
    form, sizes = FORMS[name]
    model, _ = converted(write_checkpoint(tmp_path / "tiny", form, sizes))

    # llama.cpp adds 1 and takes exp in the checkpoint's f16, we in float32: test_arithmetic_is_done_in_float32
    def rounded(tensor: str) -> bool:
        return form.dtype == "F16" and tensor.endswith(("norm.weight", "ssm_a")) and not tensor.endswith("ssm_norm.weight")

    assert_tensors(model, GOLDEN_FORMS[name], rounded)
    assert described(model.metadata) == GOLDEN_FORMS[f"{name} metadata"]


@pytest.mark.parametrize("name", DRAFTS)
def test_the_mtp_block_alone_is_what_llama_cpp_makes_of_it(tmp_path: Path, name: str) -> None:
    form, sizes = DRAFTS[name]
    model, done = converted(write_checkpoint(tmp_path / "tiny", form, sizes), mtp="only")
    assert_tensors(model, GOLDEN_FORMS[name])
    assert described(model.metadata) == GOLDEN_FORMS[f"{name} metadata"]
    assert any("of the trunk's layers (--mtp-only)" in note for note in done.notes)
    with LlamaLog(), load_model(tmp_path / "tiny.gguf", LoadParams(n_ctx=256, load_mtp=True)) as loaded:
        assert loaded.n_layer == 4


def test_forms_of_the_same_weights_are_the_same_file(tmp_path: Path) -> None:
    forms = (
        Form(),
        Form(packed=False, shards=2, index=False),
        Form(nested=True, vision=True, mtp_packed=False),
        Form(packed=False, mtp_packed=False, nested=True, shards=4),
    )
    hashes = set()
    for number, form in enumerate(forms):
        folder = write_checkpoint(tmp_path / str(number) / "tiny", form)
        hashes.add(hashlib.sha256(converted_file(folder).read_bytes()).hexdigest())
    assert len(hashes) == 1


def converted_file(folder: Path, **options: Any) -> Path:
    return convert(folder, folder.with_suffix(".gguf"), **options).path


def test_a_checkpoint_is_read_like_the_file_that_it_becomes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(packed=False))
    source = open_checkpoint(folder)
    model, done = converted(folder)
    assert digests(source) == digests(model)
    assert header(source.metadata, []) == header(model.metadata, [])  # f32 is rounded when it is written
    assert done.notes == source.notes
    for one, other in zip(source.tensors, model.tensors, strict=True):
        total = n_rows(one.shape)
        for start, stop in {(0, total), (0, 1), (total // 3, 2 * total // 3 + 1), (total - 1, total)}:
            np.testing.assert_array_equal(one.rows(start, stop), other.rows(start, stop))
            assert bytes(one.raw(start, stop)) == bytes(other.raw(start, stop))


def flat(entry: Row | Either) -> Iterator[Row]:
    """A row, or all rows of alternatives."""
    yield from [entry] if isinstance(entry, Row) else itertools.chain(*entry)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.gguf_name)
@pytest.mark.parametrize("packed", [True, False])
def test_names_are_those_of_gguf_py(tmp_path: Path, arch: Any, packed: bool) -> None:
    """Every row of the trunk maps its source name to what gguf's own table says."""
    config = read_config(write_checkpoint(tmp_path / "tiny", Form(packed=packed, arch=arch.gguf_name, nested=arch.gguf_name in NESTED)))
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch.gguf_name]
    theirs = gguf.TensorNameMap(number, 5)
    rows = [row for entry in arch.rows(config, arch.dims(config), 0) for row in flat(entry)]
    assert len(rows) > 60
    for row in rows:
        if "switch_mlp" in row.source or "in_proj_qkvz" in row.source:  # names that its converter replaces
            continue
        halves = {"gate_exps": "gate_proj", "up_exps": "up_proj"}
        half = next((proj for part, proj in halves.items() if part in row.target), "")
        source = row.source.replace(".{e}", "").replace("gate_up_proj", half).replace(".dt_bias", ".dt_proj.bias")
        source += ".weight" if source.endswith(("experts.gate_proj", "experts.up_proj", "experts.down_proj")) else ""
        assert theirs.get_name(source, try_suffixes=(".weight", ".bias")) == row.target, row.source


def test_arithmetic_is_done_in_float32(tmp_path: Path) -> None:
    """1 + w of an f16 checkpoint is not rounded to f16, and no transform happens twice."""
    model, _ = converted(write_checkpoint(tmp_path / "tiny", Form(dtype="F16")))
    found, source = {tensor.name: values_of(tensor) for tensor in model.tensors}, weights(Sizes())
    np.testing.assert_array_equal(
        found["blk.3.attn_q_norm.weight"], 1 + source["model.layers.3.self_attn.q_norm.weight"].astype(np.float16).astype(np.float32)
    )
    conv = source["model.layers.0.linear_attn.conv1d.weight"][:, 0].astype(np.float16).astype(np.float32)
    k0, k1 = conv[64:96].reshape(2, 16, 4), conv[96:].reshape(2, 16, 4)
    np.testing.assert_array_equal(found["blk.0.ssm_conv1d.weight"], np.concatenate([conv[:64], k0[0], k1[0], k0[1], k1[1]]))
    a_log = source["model.layers.0.linear_attn.A_log"].astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(found["blk.0.ssm_a"], -np.exp(a_log[[0, 2, 1, 3]]), rtol=1e-6)
    np.testing.assert_array_equal(
        found["blk.0.ssm_norm.weight"], source["model.layers.0.linear_attn.norm.weight"].astype(np.float16).astype(np.float32)
    )


@pytest.mark.parametrize(("dtype", "file_type"), [("BF16", 32), ("F16", 1), ("F32", 0)])
def test_auto_keeps_what_the_checkpoint_has(tmp_path: Path, dtype: str, file_type: int) -> None:
    model, done = converted(write_checkpoint(tmp_path / "tiny", Form(dtype=dtype)))
    types = {tensor.name: tensor.type.name for tensor in model.tensors}
    assert done.type == dtype.lower() == types["blk.0.ffn_gate_exps.weight"]
    assert model.metadata["general.file_type"].value == file_type
    always_f32 = [name for name, kind in types.items() if kind == "f32"]
    assert len(always_f32) == (len(types) if dtype == "F32" else 40)


@pytest.mark.parametrize(("float_type", "file_type"), [("bf16", 32), ("f16", 1), ("f32", 0), ("q8_0", 7)])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_casts_are_those_of_gguf_py(tmp_path: Path, dtype: str, float_type: str, file_type: int) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(dtype=dtype, mtp=False), Sizes(n_layer=1), edit=add_a_third)
    source = open_checkpoint(folder)
    model, done = converted(folder, float_type=float_type)
    assert model.metadata["general.file_type"].value == file_type
    assert done.type == float_type
    kind = gguf.GGMLQuantizationType[float_type.upper()]
    cast = 0
    for one, other in zip(source.tensors, model.tensors, strict=True):
        stays = len(one.shape) == 1 or one.name.endswith(ALWAYS_F32)
        wanted = None if stays else gguf.quantize(values_of(one), kind)
        cast += wanted is not None
        assert bytes_of(other) == (values_of(one) if wanted is None else wanted).tobytes(), one.name
    assert cast == 13


def add_a_third(values: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Values that no 16-bit type holds, so that rounding shows."""
    for name in values:
        values[name] = (values[name] * np.float32(4 / 3)).astype(np.float32)


def test_rows_that_are_no_whole_blocks_fall_back_to_f16_and_say_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False), Sizes(n_layer=1, ff=40))
    model, done = converted(folder, float_type="q8_0")
    types = {tensor.name: tensor.type.name for tensor in model.tensors}
    assert types["blk.0.ffn_down_exps.weight"] == "f16"
    assert types["blk.0.ffn_gate_exps.weight"] == "q8_0"
    assert "blk.0.ffn_down_exps.weight: rows of 40 are no whole blocks of q8_0, written as f16" in done.notes


def set_value(name: str, index: tuple[int, ...], value: float) -> Callable[[dict[str, np.ndarray], dict[str, Any]], None]:
    def edit(values: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        values[name][index] = value

    return edit


def test_f16_never_holds_infinity(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.shared_expert.up_proj.weight"
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False), Sizes(n_layer=1), edit=set_value(name, (1, 2), 1e5))
    model, done = converted(folder, float_type="f16")
    types = {tensor.name: tensor.type.name for tensor in model.tensors}
    assert types["blk.0.ffn_up_shexp.weight"] == "bf16"
    assert types["blk.0.ffn_gate_shexp.weight"] == "f16"
    assert [note for note in done.notes if "beyond" in note] == ["blk.0.ffn_up_shexp.weight: values beyond f16's 65504, written as bf16"]


@pytest.mark.parametrize("float_type", ["bf16", "q8_0"])
def test_values_beyond_a_type_are_refused(tmp_path: Path, float_type: str) -> None:
    name = "model.layers.0.mlp.shared_expert.up_proj.weight"
    edit = set_value(name, (1, 2), float(np.finfo(np.float32).max))
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False, dtype="F32"), Sizes(n_layer=1), edit=edit)
    with pytest.raises(BadInput, match=rf"tensor blk\.0\.ffn_up_shexp\.weight has values that are too large for {float_type}"):
        convert(folder, tmp_path / "x.gguf", float_type=float_type)
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("packed", "name", "index", "said"),
    [
        (True, "model.layers.0.mlp.experts.gate_up_proj", (2, 40, 3), "experts.gate_up_proj, expert 2, row 40, column 3 is NaN"),
        (False, "model.layers.0.mlp.experts.2.up_proj.weight", (8, 3), "experts.2.up_proj.weight, row 8, column 3 is NaN"),
        (True, "model.layers.0.linear_attn.in_proj_qkv.weight", (100, 0), "in_proj_qkv.weight, row 100, column 0 is NaN"),
        (True, "model.norm.weight", (7,), "model.norm.weight, column 7 is NaN"),
    ],
)  # fmt: skip
def test_nan_is_named_and_nothing_is_written(tmp_path: Path, packed: bool, name: str, index: tuple[int, ...], said: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(packed=packed, mtp=False), Sizes(n_layer=1), edit=set_value(name, index, np.nan))
    with pytest.raises(BadInput) as caught:
        convert(folder, tmp_path / "x.gguf")
    assert said in caught.value.message
    assert not list(tmp_path.glob("*.gguf*"))
    with pytest.raises(BadInput, match="is NaN or infinite"):  # quantize reads the same tensors itself
        [tensor.rows(0, n_rows(tensor.shape)) for tensor in open_checkpoint(folder).tensors]


def test_a_transform_that_overflows_is_named(tmp_path: Path) -> None:
    edit = set_value("model.layers.0.linear_attn.A_log", (1,), 100.0)
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False), Sizes(n_layer=1), edit=edit)
    with pytest.raises(BadInput, match=r"linear_attn\.A_log overflows on its way to blk\.0\.ssm_a"):
        convert(folder, tmp_path / "x.gguf")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("promised", [0, 1, None])
@pytest.mark.parametrize("there", [False, True])
def test_mtp_is_decided_by_the_tensors(tmp_path: Path, there: bool, promised: int | None, nested: bool) -> None:
    def edit(values: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        text = config.get("text_config", config)
        text["mtp_num_hidden_layers"] = promised
        if promised is None:
            del text["mtp_num_hidden_layers"]

    model, done = converted(write_checkpoint(tmp_path / "tiny", Form(mtp=there, nested=nested), edit=edit))
    assert model.metadata["qwen35moe.block_count"].value == 4 + there
    assert ("qwen35moe.nextn_predict_layers" in model.metadata) == there
    assert model.metadata["qwen35moe.attention.recurrent_layers"].value == [True, True, True, False] + [False] * there
    assert any(tensor.name.startswith("blk.4.") for tensor in model.tensors) == there
    said = [note for note in done.notes if "MTP" in note]
    assert bool(said) == (there != bool(promised))


def test_no_mtp_leaves_the_block_out_and_says_so(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole" / "tiny", Form())
    without = write_checkpoint(tmp_path / "without" / "tiny", Form(mtp=False))
    model, done = converted(whole, mtp=False)
    wanted, _ = converted(without)
    assert digests(model) == digests(wanted)
    assert {k: v for k, v in model.metadata.items() if k != "general.size_label"} == {
        k: v for k, v in wanted.metadata.items() if k != "general.size_label"
    }
    assert "left out: the MTP block (--no-mtp)" in done.notes


def test_vision_tensors_are_left_out_and_said_so(tmp_path: Path) -> None:
    model, done = converted(write_checkpoint(tmp_path / "tiny", Form(vision=True, nested=True)))
    assert "left out: 2 tensors (vision)" in done.notes
    assert not any("visual" in tensor.name for tensor in model.tensors)


def test_tied_embeddings_write_no_output(tmp_path: Path) -> None:
    model, _ = converted(write_checkpoint(tmp_path / "tiny", Form(tied=True)))
    assert "output.weight" not in {tensor.name for tensor in model.tensors}


def test_the_source_is_covered_once(tmp_path: Path) -> None:
    """As many weights go out as came in: nothing is dropped, nothing is written twice."""
    model, _ = converted(write_checkpoint(tmp_path / "tiny", Form()))
    total = sum(int(np.prod(shape)) for shape in all_shapes(Sizes()).values())
    assert sum(int(np.prod(tensor.shape)) for tensor in model.tensors) == total
    assert len(in_form(weights(Sizes()), Form(packed=False))) > len(model.tensors)


def test_trunk_in_order_of_its_layers_then_the_mtp_block(tmp_path: Path) -> None:
    """The MTP block is last, so that a mapping of the trunk does not span it."""
    form, sizes = Form(), Sizes()
    path = converted_file(write_checkpoint(tmp_path / "tiny", form, sizes))
    names = [tensor.name for tensor in read_gguf(path).tensors]
    output = names.index("output.weight")
    trunk, mtp = names[:output], names[output + 1 :]
    assert (trunk[0], trunk[-1]) == ("token_embd.weight", "output_norm.weight")
    blocks = [int(name.split(".")[1]) for name in trunk[1:-1]]
    assert blocks == sorted(blocks)
    assert {name.split(".")[1] for name in mtp} == {str(max(blocks) + 1)}


@pytest.mark.parametrize(("mtp", "packed"), [(True, True), (False, False)])
def test_true_widths_of_the_35b(tmp_path: Path, mtp: bool, packed: bool) -> None:
    """Names, shapes and count of Qwen3.6-35B-A3B, from a sparse checkpoint of 70 GB with its config."""
    sizes = Sizes(2048, 16, 2, 256, 16, 32, 128, 4, 40, 256, 8, 512, 512, 248320)
    folder = write_checkpoint(
        tmp_path / "tiny", Form(mtp=False), edit=lambda values, config: config.update(config_json(sizes, Form(mtp=mtp)))
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(sizes.vocab)))
    shapes = {name: shape for name, shape in all_shapes(sizes).items() if mtp or not name.startswith("mtp.")}
    if not packed:
        shapes = dict(itertools.chain.from_iterable(map(unpacked, shapes.items())))
    sparse_safetensors(folder / "model.safetensors", shapes)
    facts = prepare(folder)
    trunk = {line.name: line.shape for line in facts.tensors if not line.name.startswith("blk.40.")}
    assert trunk == dict(tensors_35b(sizes.vocab))
    assert len(facts.tensors) == (753 if mtp else 733)
    assert facts.n_bytes > 69e9
