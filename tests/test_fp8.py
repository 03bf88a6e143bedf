"""FP8 checkpoints: the bytes of llama.cpp's own converter, the values of numpy, and every wrong scale named."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_convert import convert, open_checkpoint, prepare
from a3b_convert.floats import E4M3
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import Model, n_rows
from fp8 import FP8, GOLDEN_FORMS, Stored, decode, save_fp8, spread, stored, write_fp8
from golden_files import GOLDEN
from test_convert import assert_tensors, bytes_of, digests, values_of
from tiny import Form, Sizes, bf16_rounded

SMALL = Sizes(n_layer=1)
GOLDENS: dict[str, Any] = json.loads((GOLDEN / "convert_fp8.json").read_text(encoding="utf-8"))
PER_EXPERT, PACKED = Form(packed=False, mtp=False), Form(mtp=False)
UP = "model.layers.0.mlp.experts.2.up_proj.weight"


def converted(folder: Path, **options: Any) -> Model:
    return open_gguf_model(convert(folder, folder.with_suffix(".gguf"), **options).path)


@pytest.mark.parametrize("float_type", ["auto", "f32"])
@pytest.mark.parametrize("name", GOLDEN_FORMS)
def test_r8_fp8_is_written_as_llama_cpp_writes_it(tmp_path: Path, name: str, float_type: str) -> None:
    fp8, form = GOLDEN_FORMS[name]
    assert_tensors(converted(write_fp8(tmp_path / "tiny", fp8, form), float_type=float_type), GOLDENS[f"{name}: {float_type}"])


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("packed", [True, False])
def test_values_are_code_times_scale(tmp_path: Path, method: str, strategy: str, packed: bool) -> None:
    fp8, form = FP8(method, strategy), PACKED if packed else PER_EXPERT
    source, model = stored(fp8, form, SMALL), converted(write_fp8(tmp_path / "tiny", fp8, form, SMALL), float_type="f32")
    found = {tensor.name: tensor for tensor in model.tensors}

    def product(name: str) -> np.ndarray:
        codes, scale = source[name][1], source[name + fp8.ending][1]
        return decode(codes) * spread(fp8, scale, codes.shape)

    experts = "model.layers.0.mlp.experts."
    down = product(experts + "down_proj") if packed else np.stack([product(f"{experts}{e}.down_proj.weight") for e in range(4)])
    np.testing.assert_array_equal(values_of(found["blk.0.ffn_down_exps.weight"]), down)
    out = product("model.layers.0.linear_attn.out_proj.weight").reshape(64, 2, 2, 16).swapaxes(1, 2).reshape(64, 64)
    np.testing.assert_array_equal(values_of(found["blk.0.ssm_out.weight"]), out)


@pytest.mark.parametrize(("form", "name", "shape"), [
    (PER_EXPERT, UP, ()), (PER_EXPERT, UP, (1, 1)), (PACKED, "model.layers.0.mlp.experts.down_proj", (4,)), (PER_EXPERT, UP, (32,)),
])  # fmt: skip
def test_scales_of_whole_tensors_and_rows_have_several_shapes(tmp_path: Path, form: Form, name: str, shape: tuple[int, ...]) -> None:
    fp8 = FP8(strategy="tensor")
    folder, tensors = write_fp8(tmp_path / "tiny", fp8, form, SMALL), stored(fp8, form, SMALL)
    scale = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    tensors[name + fp8.ending] = ("F32", scale)
    save_fp8(folder / "model.safetensors", tensors)
    found = {tensor.name: tensor for tensor in converted(folder, float_type="f32").tensors}
    codes = tensors[name][1]
    wanted = decode(codes) * (scale.reshape(scale.shape + (1,) * (codes.ndim - len(shape))))
    target = found[f"blk.0.ffn_{'down' if 'down' in name else 'up'}_exps.weight"]
    np.testing.assert_array_equal(values_of(target) if form is PACKED else values_of(target)[2], wanted)


def test_rows_are_read_one_by_one_as_all_together(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "tiny", FP8(), PACKED, SMALL)
    for tensor in open_checkpoint(folder).tensors:
        total = n_rows(tensor.shape)
        whole = tensor.rows(0, total)
        for start in range(0, total, 7):
            np.testing.assert_array_equal(tensor.rows(start, min(start + 7, total)), whole[start : start + 7])


def test_the_table_is_the_specification() -> None:
    np.testing.assert_array_equal(E4M3, decode(np.arange(256, dtype=np.uint8)))
    assert (E4M3[0x7E], E4M3[0x01], E4M3[0x08], E4M3[0x38], E4M3[0xBC]) == (448, 2**-9, 2**-6, 1, -1.5)


def test_auto_is_bf16_and_says_so(tmp_path: Path) -> None:
    fp8, form = FP8(activations="input_scale"), PER_EXPERT
    folder = write_fp8(tmp_path / "tiny", fp8, form, SMALL)
    facts = prepare(folder)
    lines = {line.name: line for line in facts.tensors}
    assert (lines["blk.0.ffn_up_exps.weight"].source_type, lines["blk.0.ffn_up_exps.weight"].type) == ("f8_e4m3", "bf16")
    assert (lines["token_embd.weight"].source_type, facts.type) == ("bf16", "bf16")
    n_scaled = sum(kind == "F8_E4M3" for kind, _ in stored(fp8, form, SMALL).values())
    assert f"FP8: {n_scaled} tensors are multiplied with their scales, rounded to bf16; --type f32 keeps the products" in facts.notes
    assert any(note.startswith(f"left out: {n_scaled} scales of activations (.input_scale)") for note in facts.notes)
    assert f"FP8: {n_scaled} tensors are multiplied with their scales" in prepare(folder, float_type="f16").notes
    exact, rounded = converted(folder, float_type="f32"), converted(folder)
    for one, other in zip(exact.tensors, rounded.tensors, strict=True):
        if other.type.name == "bf16" and one.name.endswith("_exps.weight"):
            assert np.abs(values_of(one) / values_of(other) - 1)[values_of(other) != 0].max() <= 2**-8
    assert digests(converted(folder)) == digests(open_checkpoint(folder)), "one pass quantizes what convert writes"


def test_unscaled_checkpoints_that_claim_fp8_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "tiny", FP8(), PACKED, SMALL)
    plain = {name: value for name, value in stored(FP8(), PACKED, SMALL).items() if value[0] == "BF16"}
    for name, (kind, codes) in stored(FP8(), PACKED, SMALL).items():
        if kind == "F8_E4M3":
            plain[name] = ("F32", bf16_rounded(decode(codes)))
    save_fp8(folder / "model.safetensors", plain)
    assert "config.json says FP8, but no tensor has a scale: all are taken as they are" in prepare(folder).notes


def refusal(tmp_path: Path, edit: Callable[[Stored], object], form: Form = PER_EXPERT) -> BadInput:
    """What convert says to the edited tensors; nothing may be left behind."""
    folder, tensors = write_fp8(tmp_path / "tiny", FP8(), form, SMALL), stored(FP8(), form, SMALL)
    edit(tensors)
    save_fp8(folder / "model.safetensors", tensors)
    with pytest.raises(BadInput) as caught:
        convert(folder, tmp_path / "x.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert str(folder) in caught.value.message
    assert caught.value.hint
    return caught.value


def put(name: str, index: tuple[int, ...], value: float) -> Callable[[Stored], object]:
    return lambda tensors: tensors[name][1].__setitem__(index, value)


def shaped(name: str, *shape: int) -> Callable[[Stored], object]:
    return lambda tensors: tensors.update({name: ("F32", np.ones(shape, np.float32))})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(UP + "_scale_inv"), f"tensor {UP} is FP8, and its scale {UP}_scale_inv or {UP}_scale is missing"),
        (lambda t: t.pop(UP), f"tensor {UP}_scale_inv is the scale of {UP}, which is missing"),
        (shaped(UP + "_scale_inv", 2, 3), f"{UP}_scale_inv has shape [2, 3]; for {UP} of [32, 64] in blocks of [24, 20] it must be [2, 4]"),
        (shaped(UP + "_scale_inv", 4, 2), f"{UP}_scale_inv has shape [4, 2]; for {UP}"),
        (shaped(UP + "_scale_inv"), f"{UP}_scale_inv has shape []; for {UP}"),
        (shaped(UP, 32, 64), f"{UP} has dtype F32 and a scale, {UP}_scale_inv; expected F8_E4M3"),
        (put(UP, (5, 7), 0x7F), f"tensor {UP}, row 5, column 7 is NaN"),
        (put(UP, (5, 7), 0xFF), f"tensor {UP}, row 5, column 7 is NaN"),
        (put(UP + "_scale_inv", (1, 2), np.nan), f"tensor {UP}_scale_inv, row 1, column 2 is NaN or infinite"),
        (put(UP + "_scale_inv", (1, 2), np.inf), f"tensor {UP}_scale_inv, row 1, column 2 is NaN or infinite"),
        (lambda t: t.update({UP + "_scale_inv": ("U8", np.ones((2, 4), np.uint8))}), f"the scale of {UP}, has dtype U8"),
        (lambda t: t.update({"x.qweight": ("F32", np.ones(1, np.float32))}), "x.qweight belongs to weights that are quantized already"),
    ],
)  # fmt: skip
def test_wrong_scales_and_codes_are_named(tmp_path: Path, edit: Callable[[Stored], object], said: str) -> None:
    assert said in refusal(tmp_path, edit).message


def test_a_packed_tensor_names_the_expert(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert f"tensor {name}, expert 2, row 40, column 3 is NaN" in refusal(tmp_path, put(name, (2, 40, 3), 0xFF), form=PACKED).message
    (tmp_path / "tiny" / "model.safetensors").unlink()
    scale = refusal(tmp_path, put(name + "_scale_inv", (2, 1, 0), np.nan), form=PACKED)
    assert f"tensor {name}_scale_inv, expert 2, row 1, column 0 is NaN or infinite" in scale.message


def test_a_product_that_no_float_holds_is_named(tmp_path: Path) -> None:
    def edit(tensors: Stored) -> None:
        tensors[UP][1][:], tensors[UP + "_scale_inv"][1][:] = 0x7E, 3e38

    error = refusal(tmp_path, edit)
    assert f"tensor {UP}, row 0, column 0 times its scale in {UP}_scale_inv is too large for bf16" in error.message


def test_a_weight_without_numbers_is_named(tmp_path: Path) -> None:
    fp8 = FP8(strategy="tensor")
    folder, tensors = write_fp8(tmp_path / "tiny", fp8, PER_EXPERT, SMALL), stored(fp8, PER_EXPERT, SMALL)
    tensors[UP] = ("F8_E4M3", np.zeros((32, 0), np.uint8))
    save_fp8(folder / "model.safetensors", tensors)
    with pytest.raises(BadInput, match=r"for .*up_proj.weight of \[32, 0\] it must be absent"):
        prepare(folder)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.update(fmt="e5m2"), "quantized with FP8, fmt 'e5m2'"),
        (lambda c: c.update(weight_block_size=[128]), "quantized with FP8, blocks of [128]"),
        (lambda c: c.update(weight_block_size=[0, 128]), "blocks of [0, 128]"),
    ],
)
def test_other_kinds_of_fp8_are_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str) -> None:
    assert said in edited(write_fp8(tmp_path / "tiny", FP8(), PACKED, SMALL), edit).message


def of_weights(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["config_groups"]["group_0"]["weights"].update(changes)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.update(format="pack-quantized"), "quantized with compressed-tensors, pack-quantized"),
        (lambda c: c.update(format="int-quantized"), "quantized with compressed-tensors, int-quantized"),
        (lambda c: c.update(format="nvfp4-pack-quantized"), "quantized with compressed-tensors, nvfp4-pack-quantized"),
        (lambda c: c.pop("format"), "quantized with compressed-tensors: not converted"),
        (lambda c: c.update(config_groups={}), "0 block sizes in config_groups"),
        (lambda c: c.update(config_groups={"a": 1}), "weights None"),
        (of_weights(num_bits=4), "'num_bits': 4"),
        (of_weights(type="int"), "'type': 'int'"),
        (of_weights(strategy="group"), "strategy group"),
        (of_weights(block_structure=None), "strategy block with block_structure None"),
        (of_weights(block_structure="2:4"), "blocks of '2:4'"),
        (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse (sparse-24-bitmask)"),
        (lambda c: c.update(transform_config={"config_groups": {}}), "rotated (transform_config)"),
    ],
)
def test_other_kinds_of_compressed_tensors_are_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str) -> None:
    assert said in edited(write_fp8(tmp_path / "tiny", FP8("compressed-tensors"), PACKED, SMALL), edit).message


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> BadInput:
    """What convert says when quantization_config is changed."""
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput) as caught:
        prepare(folder)
    assert "bf16 checkpoint" in caught.value.hint
    return caught.value


def test_memory_is_bounded_by_chunks_and_not_by_tensors(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "tiny", FP8(), PACKED, SMALL)
    tensors, config = stored(FP8(), PACKED, SMALL), json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 64, "moe_intermediate_size": 4096}))
    for name, rows, cols in (("gate_up_proj", 8192, 64), ("down_proj", 64, 4096)):
        name = f"model.layers.0.mlp.experts.{name}"
        tensors[name] = ("F8_E4M3", np.zeros((64, rows, cols), np.uint8))
        tensors[name + "_scale_inv"] = ("F32", np.ones((64, -(-rows // 24), -(-cols // 20)), np.float32))
    tensors["model.layers.0.mlp.gate.weight"] = ("BF16", np.zeros((64, 64), np.uint16))
    save_fp8(folder / "model.safetensors", tensors)
    assert (folder / "model.safetensors").stat().st_size > 48 << 20
    for float_type in ("auto", "f32"):
        tracemalloc.start()
        convert(folder, tmp_path / "x.gguf", float_type=float_type)
        peak = tracemalloc.get_traced_memory()[1] >> 20
        tracemalloc.stop()
        assert peak < 16, f"{float_type}: {peak} MiB"


def test_bytes_do_not_depend_on_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_fp8(tmp_path / "tiny", FP8(), PER_EXPERT, SMALL)
    whole = [bytes_of(tensor) for tensor in converted(folder).tensors]
    monkeypatch.setattr("a3b_convert.conversion.CHUNK_BYTES", 300)
    monkeypatch.setattr("a3b_convert.conversion.CHUNK_VALUES", 300)
    assert [bytes_of(tensor) for tensor in converted(folder).tensors] == whole
