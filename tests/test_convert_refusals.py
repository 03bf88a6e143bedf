"""a3b convert on what people really give it: one message with what, where and what to do, the exit code, and no file left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_convert import convert, open_checkpoint
from a3b_convert.archs import ARCHS
from a3b_gguf.errors import A3BError, BadInput, UsageError
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from command import assert_refused
from inside import inside as a3b
from tiny import Edit, Form, Sizes, Weights, in_form, save, weights, write_checkpoint

SMALL, PLAIN = Sizes(n_layer=1), Form(mtp=False)


def refusal(folder: Path, output: Path, **options: Any) -> A3BError:
    """What `convert` says; nothing may lie at the output afterwards."""
    with pytest.raises(A3BError) as caught:
        convert(folder, output, **options)
    assert not output.exists()
    assert not output.with_name(output.name + ".part").exists()
    assert caught.value.hint
    assert str(folder) in caught.value.message or isinstance(caught.value, UsageError)
    return caught.value


def config(**changes: Any) -> Edit:
    return lambda values, found: found.update(changes)


def without(key: str) -> Edit:
    return lambda values, found: found.pop(key)


def rope(**changes: Any) -> Edit:
    return lambda values, found: found["rope_parameters"].update(changes)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (config(architectures=["LlamaForCausalLM"]), "architecture LlamaForCausalLM is not known"),
        (without("architectures"), "key architectures is missing"),
        (without("hidden_size"), "key hidden_size is missing, expected a whole number"),
        (without("linear_num_value_heads"), "key linear_num_value_heads is missing"),
        (without("head_dim"), "key head_dim is missing"),
        (without("rms_norm_eps"), "key rms_norm_eps is missing, expected a number"),
        (config(hidden_size="64"), "key hidden_size is '64', expected a whole number"),
        (config(hidden_size=True), "key hidden_size is True, expected a whole number"),
        (config(hidden_size=0), "key hidden_size is 0, expected 1 to"),
        (config(num_hidden_layers=10**9), "key num_hidden_layers is 1000000000, expected 1 to 512"),
        (config(num_experts=10**9), "key num_experts is 1000000000, expected 1 to 1024"),
        (config(hidden_act="gelu"), 'key hidden_act is "gelu", supported: "silu"'),
        (config(attention_bias=True), "key attention_bias is true, supported: false"),
        (config(attn_output_gate=False), "key attn_output_gate is false, supported: true"),
        (config(mlp_only_layers=[0]), "key mlp_only_layers is [0], supported: []"),
        (config(mtp_use_dedicated_embeddings=True), "key mtp_use_dedicated_embeddings is true"),
        (config(linear_value_head_dim=32), "key linear_value_head_dim is 32, supported: 16"),
        (config(linear_num_value_heads=3), "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        (config(layer_types=["sliding_attention"]), "layer_types holds sliding_attention"),
        (config(layer_types=[]), "layer_types has 0 entries, num_hidden_layers is 1"),
        (config(num_experts_per_tok=5), "num_experts_per_tok is 5, num_experts only 4"),
        (config(rope_parameters=[]), "key rope_parameters is [], expected an object"),
        (config(rms_norm_eps=float("nan")), "key rms_norm_eps is nan, which no file can hold"),
        (config(layer_types=None, full_attention_interval=0), "key full_attention_interval is 0, expected 1 to"),
        (rope(rope_theta=1e300), "key rope_parameters.rope_theta is 1e+300, which no file can hold"),
        (rope(rope_type="longrope"), 'key rope_parameters.rope_type is "longrope", supported: "default" or "yarn"'),
        (rope(rope_type="yarn"), "key rope_parameters.factor is missing"),
        (rope(rope_theta=None), "key rope_parameters.rope_theta is missing"),
        (rope(mrope_section=[2, 2, 2]), "mrope_section is [2, 2, 2], expected up to 4 numbers that add up to 4"),
        (rope(mrope_section=[2, 2, 0]), "mrope_section is [2, 2, 0], expected [2, 1, 1]: with others llama.cpp leaves some of the 4 pairs"),
        (rope(mrope_section=[3, 1]), "mrope_section is [3, 1], expected [2, 1, 1]"),
        (rope(partial_rotary_factor=0.01), "partial_rotary_factor 0.01 rotates 0 of 32 columns"),
        (config(quantization_config={"quant_method": "fp8", "fmt": "e5m2"}), "the weights are quantized with FP8, fmt 'e5m2'"),
        (config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "quantized with bitsandbytes, 4 bits"),
        (config(quantization_config={"quant_method": "awq", "bits": 4}), "quantized with AWQ, 4 bits"),
        (config(quantization_config={"quant_method": "gptq", "bits": 8}), "quantized with GPTQ, 8 bits"),
        (config(quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}), "nvfp4-pack-quantized"),
        (config(quantization_config={"quant_algo": "NVFP4"}), "quantized with NVFP4"),
        (config(quantization_config={"quant_method": "new"}), "quantized with the scheme 'new'"),
        (config(text_config=[]), "key text_config is [], expected an object"),
    ],
)
def test_a_config_that_is_not_implemented_stops_the_conversion(tmp_path: Path, edit: Edit, said: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL, edit=edit)
    error = refusal(folder, tmp_path / "x.gguf")
    assert isinstance(error, BadInput)
    assert said in error.message
    assert "config.json" in error.message


def renamed(old: str, new: str) -> Edit:
    return lambda values, found: values.update({new: values.pop(old)})


def reshaped(name: str, *axes: int) -> Edit:
    return lambda values, found: values.update({name: np.ascontiguousarray(values[name].transpose(axes))})


LAYER = "model.layers.0."


def with_empty(name: str, n: int = 2) -> Edit:
    return lambda values, found: values.update({name: np.zeros(n, np.float32)})


@pytest.mark.parametrize(
    ("form", "edit", "said"),
    [
        (PLAIN, lambda v, c: v.pop("model.norm.weight"), "1 tensors of qwen35moe are missing: model.norm.weight"),
        (PLAIN, lambda v, c: v.pop("lm_head.weight"), "are missing: lm_head.weight"),
        (PLAIN, lambda v, c: v.update(extra=v["lm_head.weight"]), "1 tensors match no row of qwen35moe: extra"),
        (PLAIN, lambda v, c: v.pop(LAYER + "mlp.experts.down_proj"), "are missing: model.layers.0.mlp.experts.down_proj"),
        (
            Form(mtp=False, packed=False),
            lambda v, c: v.pop(LAYER + "mlp.experts.2.up_proj.weight"),
            "1 tensors of qwen35moe are missing: model.layers.0.mlp.experts.2.up_proj.weight",
        ),
        (
            Form(mtp=False, packed=False),
            renamed(LAYER + "mlp.experts.3.up_proj.weight", LAYER + "mlp.experts.4.up_proj.weight"),
            "missing: model.layers.0.mlp.experts.3.up_proj.weight; 1 tensors match no row of qwen35moe: model.layers.0.mlp.experts.4.up",
        ),
        (Form(), lambda v, c: v.pop("mtp.fc.weight"), "are missing: mtp.fc.weight"),
        (Form(), lambda v, c: [v.pop(n) for n in list(v) if n.startswith("mtp.layers")], "16 tensors of qwen35moe are missing: mtp.lay"),
        (Form(), lambda v, c: v.update({"mtp.layers.1.x": v["mtp.norm.weight"]}), "match no row of qwen35moe: mtp.layers.1.x"),
        (PLAIN, reshaped(LAYER + "mlp.experts.down_proj", 2, 0, 1), "has shape [32, 4, 64], config.json asks for [experts 4, hidden 64"),
        (PLAIN, with_empty("model.norm.weight", 0), "tensor model.norm.weight has shape [0], config.json asks for [hidden 64]"),
        (PLAIN, config(num_experts=8), "mlp.gate.weight has shape [4, 64], config.json asks for [experts 8, hidden 64]"),
        (PLAIN, config(vocab_size=400), "embed_tokens.weight has shape [320, 64], config.json asks for [vocab 400, hidden 64]"),
        (PLAIN, lambda v, c: v.update({"language_model.model.norm.weight": v["model.norm.weight"]}), "are both model.norm.weight"),
        (PLAIN, with_empty("x.weight_scale_inv"), "x.weight_scale_inv belongs to weights that are quantized already (FP8)"),
        (PLAIN, with_empty("x.SCB"), "x.SCB belongs to weights that are quantized already (bitsandbytes)"),
        (PLAIN, with_empty("x.qweight"), "quantized already (GPTQ or AWQ)"),
        (PLAIN, with_empty("x.weight_packed"), "quantized already (compressed-tensors)"),
        (PLAIN, with_empty("x.weight_scale_2"), "quantized already (NVFP4)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_match_are_named(tmp_path: Path, form: Form, edit: Edit, said: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", form, SMALL, edit=edit)
    error = refusal(folder, tmp_path / "x.gguf")
    assert isinstance(error, BadInput)
    assert said in error.message


def test_a_dtype_that_is_not_converted_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False, dtype="F64"), SMALL)
    error = refusal(folder, tmp_path / "x.gguf")
    assert "tensor model.embed_tokens.weight has dtype F64, expected one of BF16, F16, F32" in error.message


def test_experts_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False, packed=False), SMALL)
    path, name = folder / "model.safetensors", LAYER + "mlp.experts.1.gate_proj.weight"
    save(path, in_form(weights(SMALL, mtp=False), Form(packed=False)), others={name: "F32"})
    error = refusal(folder, tmp_path / "x.gguf")
    assert f"{LAYER}mlp.experts.0.gate_proj.weight (BF16) and {name} (F32) become one, but differ in dtype" in error.message


def test_a_tensor_is_cut_off_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    error = refusal(folder, tmp_path / "x.gguf")
    assert "is cut off: its tensors need" in error.message


def test_the_output_is_never_the_input(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    source = folder / "model.safetensors"
    before = source.read_bytes()
    for output in (source, folder / "config.json", tmp_path / "link.gguf"):
        if not output.exists():
            output.symlink_to(source)
        with pytest.raises(UsageError, match="is the input"):
            convert(folder, output)
    with pytest.raises(UsageError, match="is a folder"):
        convert(folder, tmp_path)
    with pytest.raises(UsageError, match="the folder of the output must exist|No such file"):
        convert(folder, tmp_path / "absent" / "x.gguf")
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    with pytest.raises(UsageError, match="is the input"):
        convert(folder, template, chat_template=template)
    template.unlink()
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.gguf", "tiny"]


def test_an_output_of_before_is_replaced_wherever_it_lies(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    first = convert(folder, folder / "x.gguf", float_type="f32")
    second = convert(folder, folder / "x.gguf")
    assert (folder / "x.gguf").stat().st_size == second.n_bytes < first.n_bytes


def test_a_type_that_is_unknown_is_a_usage_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    error = refusal(folder, tmp_path / "x.gguf", float_type="q4_k")
    assert isinstance(error, UsageError)
    assert "auto, bf16, f16, f32, q8_0" in error.hint


def test_unknown_architectures_hear_which_are_known(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL, edit=config(architectures=["X"]))
    assert all(name in refusal(folder, tmp_path / "x.gguf").hint for arch in ARCHS for name in arch.hf_names)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"<think>"', '"<\\ud800>"'))
    assert "tokenizer.ggml.tokens holds '\\ud800', which is no character" in refusal(folder, tmp_path / "x.gguf").message


def test_the_command_says_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    assert_refused(a3b("convert", tmp_path / "absent"), 3, "absent does not exist")
    assert_refused(a3b("convert", folder / "config.json"), 3, "config.json is a file", "folder")
    assert_refused(a3b("convert", tmp_path, cwd=tmp_path), 3, "has no config.json")
    assert_refused(a3b("convert", folder, "-o", folder / "model.safetensors"), 2, "is the input")
    assert_refused(a3b("convert", folder, "--type", "q9"), 2, "there is no type 'q9'")
    assert_refused(a3b("convert", folder, "--chat-template", tmp_path / "no"), 2, "--chat-template", "is not a file")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(a3b("convert", folder, cwd=tmp_path), 3, "holds PyTorch pickles")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_command_converts_shows_and_prints_json(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(vision=True), Sizes())
    done = a3b("convert", folder, "--dry-run", "--json", cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert len(facts["tensors"]) == 96
    assert facts["tensors"][0] == {"name": "token_embd.weight", "shape": [320, 64], "source_type": "bf16", "type": "bf16", "n_bytes": 40960}
    shown = a3b("convert", folder, "--dry-run", cwd=tmp_path)
    assert f"{facts['n_bytes']:,} bytes" in shown.stdout
    assert "blk.4.nextn.eh_proj.weight" in shown.stdout
    made = a3b("convert", folder, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("tiny-BF16.gguf: qwen35moe, 96 tensors (56 bf16, 40 f32)")
    assert "note: left out: 2 tensors (vision)" in made.stderr
    assert (tmp_path / "tiny-BF16.gguf").stat().st_size == facts["n_bytes"]
    again = a3b("convert", folder, "--type", "f16", "--no-mtp", "-o", "y.gguf", "--json", cwd=tmp_path)
    said = json.loads(again.stdout)
    assert (said["path"], said["n_tensors"], said["types"]) == ("y.gguf", 76, {"f16": 45, "f32": 31})
    assert again.stderr == ""
    assert read_gguf(tmp_path / "y.gguf").metadata["general.file_type"].value == 1


def test_a_template_given_by_hand_is_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    (tmp_path / "mine.jinja").write_text("mine")
    model = open_checkpoint(folder, chat_template=tmp_path / "mine.jinja")
    assert model.metadata["tokenizer.chat_template"].value == "mine"
    assert f"chat template: {tmp_path / 'mine.jinja'}" in model.notes


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX")
def test_a_disk_that_is_full_before_the_first_tensor_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, Sizes())
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
        f"sys.argv = ['a3b', 'convert', {str(folder)!r}, '-o', {str(tmp_path / 'x.gguf')!r}]; from a3b_gguf.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert_refused(done, 4, "x.gguf: File too large while writing; nothing was left behind", "free some space")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def wide_experts(values: Weights, found: dict[str, Any]) -> None:
    """A packed expert tensor of 64 MiB in bf16, and its smaller kin."""
    found.update(num_experts=64, moe_intermediate_size=4096)
    values[LAYER + "mlp.gate.weight"] = np.zeros((64, 64), np.float32)
    values[LAYER + "mlp.experts.gate_up_proj"] = np.zeros((64, 8192, 64), np.float32)
    values[LAYER + "mlp.experts.down_proj"] = np.zeros((64, 64, 4096), np.float32)


def test_memory_is_bounded_by_chunks_and_not_by_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL, edit=wide_experts)
    assert (folder / "model.safetensors").stat().st_size > 96 << 20
    peaks = {}
    for float_type in ("auto", "f16", "f32", "q8_0"):
        tracemalloc.start()
        convert(folder, tmp_path / "x.gguf", float_type=float_type)
        peaks[float_type] = tracemalloc.get_traced_memory()[1] >> 20
        tracemalloc.stop()
    assert max(peaks.values()) < 12, f"MiB: {peaks}"


@pytest.mark.parametrize("form", [Form(), Form(tied=True, mtp=False), Form(nested=True, packed=False)], ids=["flat", "tied", "nested"])
def test_llama_cpp_loads_what_is_written(tmp_path: Path, form: Form) -> None:
    folder = write_checkpoint(tmp_path / "tiny", form)
    convert(folder, tmp_path / "x.gguf")
    with LlamaLog(), load_model(tmp_path / "x.gguf", LoadParams(n_ctx=256, load_mtp=form.mtp)) as loaded:
        assert (loaded.n_layer, loaded.is_hybrid) == (4, True)
    shutil.rmtree(folder)
