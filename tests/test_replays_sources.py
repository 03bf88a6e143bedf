"""Bug reports of other converters, replayed on small checkpoints: what they ran into, and what is right instead. Each names its report."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3b_convert import convert, prepare
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import n_rows
from tiny import QWEN35, Form, Sizes, Weights, save, write_checkpoint

SMALL, PLAIN = Sizes(n_layer=1), Form(mtp=False)
# Source: PRETOKENIZE_REGEX in transformers, models/qwen2/tokenization_qwen2.py, which Qwen3, Qwen3-Coder and Qwen3-Next use too, and
# models/qwen3_5/tokenization_qwen3_5.py
OF_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OF_QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def message(folder: Path) -> str:
    """What convert says, with nothing left behind."""
    output = folder.parent / "x.gguf"
    with pytest.raises(BadInput) as caught:
        convert(folder, output)
    assert not list(folder.parent.glob("x.gguf*"))
    return caught.value.message


def edited(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_r17_missing_shard_extra_tensors_and_a_gap_are_three_errors(tmp_path: Path) -> None:
    """ggml-org/llama.cpp issue 9245 and pull request 9397"""
    absent = write_checkpoint(tmp_path / "absent", Form(mtp=False, shards=3), SMALL)
    (absent / "model-00002-of-00003.safetensors").unlink()
    assert "model.safetensors.index.json names model-00002-of-00003.safetensors, which is not there; it holds model." in message(absent)
    extra = write_checkpoint(tmp_path / "extra", Form(mtp=False, shards=3), SMALL)
    index = json.loads((extra / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("model.norm.weight")
    (extra / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has tensors that model.safetensors.index.json does not know: model.norm.weight" in message(extra)
    gap = write_checkpoint(tmp_path / "gap", Form(mtp=False, shards=3, index=False), SMALL)
    (gap / "model-00002-of-00003.safetensors").unlink()
    assert "2 of 3 shards are there; missing 00002 (there is no model.safetensors.index.json)" in message(gap)


def test_r18_cut_off_by_a_byte_or_by_a_header_too_long(tmp_path: Path) -> None:
    """ggml-org/llama.cpp pull request 6885"""
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(data[:-1])
    n_bytes = len(data) - 8 - length
    assert f"its tensors need {n_bytes:,} bytes after the header, the file has {n_bytes - 1:,}" in message(folder)
    path.write_bytes(struct.pack("<Q", len(data)) + data[8:])
    assert f"its header needs {len(data) + 8:,} bytes, the file has {len(data):,}" in message(folder)


def test_r20_extra_special_tokens_as_a_list(tmp_path: Path) -> None:
    """ggml-org/llama.cpp issue 18065: the message was that tokenizer.model is missing"""
    folder = edited(write_checkpoint(tmp_path / "tiny", PLAIN, SMALL), "tokenizer_config.json", extra_special_tokens=["<think>", "<|new|>"])
    found = read_gguf(convert(folder, tmp_path / "x.gguf").path, arrays=True).metadata
    tokens, kinds = found["tokenizer.ggml.tokens"].value, found["tokenizer.ggml.token_type"].value
    assert kinds[tokens.index("<|new|>")] == 3


@pytest.mark.parametrize(("regex", "pre"), [(OF_QWEN2, "qwen2"), (OF_QWEN35, "qwen35")])
def test_r21_the_pre_tokenizer_is_told_by_its_regex(tmp_path: Path, regex: str, pre: str) -> None:
    """ggml-org/llama.cpp issue 22700: a hash that was not in the converter's list"""
    assert OF_QWEN35 == QWEN35
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_gguf(convert(folder, tmp_path / "x.gguf").path).metadata["tokenizer.ggml.pre"].value == pre


def test_r23_which_chat_template_was_used_is_said(tmp_path: Path) -> None:
    """QwenLM/Qwen3 issue 1831: a stale template in tokenizer_config.json"""
    folder = edited(write_checkpoint(tmp_path / "tiny", PLAIN, SMALL), "tokenizer_config.json", chat_template="{{ messages }} stale")
    used = "chat template: tokenizer_config.json; chat_template.jinja differs and was not used (--chat-template FILE chooses it)"
    assert used in prepare(folder).notes
    chosen = folder / "chat_template.jinja"
    assert f"chat template: {chosen}" in prepare(folder, chat_template=chosen).notes
    written = convert(folder, tmp_path / "x.gguf", chat_template=chosen).path
    assert read_gguf(written).metadata["tokenizer.chat_template"].value == chosen.read_text()


def large(values: Weights, found: dict[str, Any]) -> None:
    values["model.layers.0.mlp.experts.down_proj"][2, 3, 4] = 1e5


def test_r25_f16_never_holds_infinity(tmp_path: Path) -> None:
    """ggml-org/llama.cpp issue 13722"""
    done = convert(write_checkpoint(tmp_path / "tiny", PLAIN, SMALL, edit=large), tmp_path / "x.gguf", float_type="f16")
    tensors = {tensor.name: tensor for tensor in open_gguf_model(done.path).tensors}
    assert {tensor.type.name for tensor in tensors.values()} == {"f16", "bf16", "f32"}
    down = tensors["blk.0.ffn_down_exps.weight"]
    assert down.type.name == "bf16"
    assert down.rows(0, n_rows(down.shape)).max() == pytest.approx(1e5, rel=2**-8)
    assert "blk.0.ffn_down_exps.weight: values beyond f16's 65504, written as bf16" in done.notes


def test_r26_nan_in_one_expert_names_it(tmp_path: Path) -> None:
    """ggml-org/llama.cpp issue 7311: the block was zeroed, or validation failed after hours"""

    def edit(values: Weights, found: dict[str, Any]) -> None:
        values["model.layers.0.mlp.experts.gate_up_proj"][3, 5, 6] = np.nan

    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL, edit=edit)
    assert "tensor model.layers.0.mlp.experts.gate_up_proj, expert 3, row 5, column 6 is NaN or infinite" in message(folder)


def test_r3_mtp_in_a_file_of_its_own_that_is_absent(tmp_path: Path) -> None:
    """ggml-org/llama.cpp issue 16361"""
    folder = write_checkpoint(tmp_path / "tiny", PLAIN, SMALL)
    trunk = {name: "model.safetensors" for name in json.loads(header(folder / "model.safetensors")) if name != "__metadata__"}
    index = {"weight_map": trunk | {"mtp.fc.weight": "mtp.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names mtp.safetensors, which is not there; it holds mtp.fc.weight" in message(folder)
    assert convert(folder, tmp_path / "x.gguf", mtp=False).n_tensors
    save(folder / "mtp.safetensors", {"mtp.fc.weight": np.zeros((64, 128), np.float32)})
    assert "tensors of qwen35moe are missing: mtp." in message_of_all(folder)


def header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + struct.unpack("<Q", data[:8])[0]]


def message_of_all(folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        prepare(folder)
    return caught.value.message
