"""Tokenizer files and chat templates: what is written is what llama.cpp's own converter writes, and what it cannot mean is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from a3b_convert.chat_template import template_metadata
from a3b_convert.config import read_config
from a3b_convert.tokenizer import tokenizer_metadata
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.metadata import Metadata, string
from golden_files import GOLDEN
from tiny import QWEN35
from tokenizer_variants import VARIANTS, write_variant

GOLDEN_VARIANTS: dict[str, Any] = json.loads((GOLDEN / "tokenizer_variants.json").read_text(encoding="utf-8"))
NAMES = {"pad_token_id": "padding_token_id"}
Edit = Callable[[dict[str, Any]], object]


def metadata(folder: Path) -> Metadata:
    config = read_config(folder)
    return tokenizer_metadata(config, config.count("vocab_size"))


def digest(values: list[str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_written_as_llama_cpp_writes_them(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    found = metadata(write_variant(tiny_checkpoint, tmp_path, name))
    theirs = GOLDEN_VARIANTS[name]
    tokens, kinds = found.pop("tokenizer.ggml.tokens").value, found.pop("tokenizer.ggml.token_type").value
    assert [[i, token, kind] for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != 1] == theirs["tokens"]
    assert digest(tokens) == theirs["tokens_sha256"]
    assert digest(found.pop("tokenizer.ggml.merges").value) == theirs["merges_sha256"]
    assert found.pop("tokenizer.ggml.pre").value == "qwen35"
    assert found.pop("tokenizer.ggml.model").value == "gpt2"
    special = {f"tokenizer.ggml.{NAMES.get(key, key)}": value for key, value in theirs["special"].items()}
    assert [(key, field.value) for key, field in found.items()] == list(special.items())


def edited(source: Path, folder: Path, file: str, edit: Edit) -> Path:
    """The embedded model's tokenizer files with one of them changed."""
    write_variant(source, folder, "as it is")
    value = json.loads((folder / file).read_text())
    edit(value)
    (folder / file).write_text(json.dumps(value))
    return folder


def test_qwen2_is_recognised_by_its_regex_and_without_normalizer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    qwen2 = QWEN35.replace(r"[\p{L}\p{M}]+", r"\p{L}+").replace(r"\p{M}", "")

    def edit(tokenizer: dict[str, Any]) -> None:
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = qwen2
        tokenizer["normalizer"] = None

    assert metadata(edited(tiny_checkpoint, tmp_path, "tokenizer.json", edit))["tokenizer.ggml.pre"].value == "qwen2"


def test_a_space_in_a_merge_is_written_as_the_byte_alphabet_writes_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(tiny_checkpoint, tmp_path, "tokenizer.json", lambda t: t["model"]["merges"].append(["a b", "c"]))
    assert metadata(folder)["tokenizer.ggml.merges"].value[-1] == "aĠb c"


def test_special_ids_are_found_in_generation_config_last(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = edited(tiny_checkpoint, tmp_path, "tokenizer_config.json", lambda c: (c.pop("eos_token"), c.pop("pad_token")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.endswith("_token_id")}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4089, 4087], "bos_token_id": 4088}))
    found = metadata(folder)
    assert found["tokenizer.ggml.eos_token_id"].value == 4089
    assert found["tokenizer.ggml.bos_token_id"].value == 4088
    (folder / "generation_config.json").unlink()
    with pytest.raises(BadInput, match="no file says which token ends a text"):
        metadata(folder)


def split(key: str, value: object) -> Edit:
    return lambda t: t["pre_tokenizer"]["pretokenizers"][0].update({key: value})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (split("pattern", {"Regex": r"\d+"}), r"the pre-tokenizer's regex is not known: \\d\+"),
        (split("behavior", "Removed"), "the pre-tokenizer is .*Removed"),
        (lambda t: t.update(pre_tokenizer=None), "the pre-tokenizer is None"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "the normalizer is .*Lowercase"),
        (lambda t: t["model"].update(type="Unigram"), "key model.type is 'Unigram'"),
        (lambda t: t["model"].update(byte_fallback=True), "key model.byte_fallback is True"),
        (lambda t: t["model"].pop("vocab"), "key model holds no vocab"),
        (lambda t: t["model"]["merges"].append("abc"), "merge 'abc' is not a pair"),
        (lambda t: t["model"]["vocab"].update({"zz": 0}), "token 'zz' has id 0, which is taken by '!'"),
        (lambda t: t["model"]["vocab"].update({"zz": []}), r"token 'zz' has id \[\], expected a whole number"),
        (lambda t: t["model"]["vocab"].update({"zz": True}), "token 'zz' has id True, expected a whole number"),
        (lambda t: t["model"]["vocab"].update({"zz": 4096}), "token 'zz' has id 4096, the model has 4096 tokens"),
        (lambda t: t["added_tokens"][0].update(id=3), r"id 3 is '\$' in the vocabulary and '<\|endoftext\|>' among"),
        (lambda t: t["added_tokens"][0].pop("content"), "lacks an id or a content"),
        (lambda t: t.update(added_tokens="x"), "added_tokens or added_tokens_decoder have another form"),
        (lambda t: t.update(post_processor={"type": "RobertaProcessing"}), "post-processor RobertaProcessing adds tokens"),
        (lambda t: t.update(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}), "adds tokens"),
        (lambda t: t.update(post_processor=[1]), "post_processor has another form"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(tiny_checkpoint: Path, tmp_path: Path, edit: Edit, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        metadata(edited(tiny_checkpoint, tmp_path, "tokenizer.json", edit))


@pytest.mark.parametrize(
    ("file", "edit", "said"),
    [
        ("tokenizer_config.json", lambda c: c.update(added_tokens_decoder={"4089": {"content": "x"}}), "id 4089 is '<|im_end|>'"),
        ("tokenizer_config.json", lambda c: c.update(added_tokens_decoder={"9" * 5000: {"content": "x"}}), "lacks an id or a content"),
        ("config.json", lambda c: c.update(bos_token_id=5000), "bos_token_id is 5000, the model has 4096 tokens"),
        ("config.json", lambda c: c.update(vocab_size=4000), "token '</think>' has id 4095, the model has 4000 tokens"),
    ],
)
def test_ids_that_contradict_are_refused(tiny_checkpoint: Path, tmp_path: Path, file: str, edit: Edit, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        metadata(edited(tiny_checkpoint, tmp_path, file, edit))
    assert said in caught.value.message


def test_files_that_are_absent_or_broken_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_variant(tiny_checkpoint, tmp_path, "as it is")
    (folder / "tokenizer.json").write_text('{"model": \n nonsense')
    with pytest.raises(BadInput, match=r"tokenizer\.json: line 2: Expecting value"):
        metadata(folder)
    (folder / "tokenizer.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(BadInput, match="not UTF-8 at byte 2"):
        metadata(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="has no tokenizer.json"):
        metadata(folder)


def test_without_tokenizer_config_the_numbers_of_config_json_count(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_variant(tiny_checkpoint, tmp_path, "as it is")
    (folder / "tokenizer_config.json").unlink()
    assert metadata(folder)["tokenizer.ggml.eos_token_id"].value == 4089


def test_chat_template_precedence_is_stated(tmp_path: Path) -> None:
    chosen = tmp_path / "mine.jinja"
    chosen.write_text("M")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert template_metadata(tmp_path, None) == said("J", "chat template: chat_template.json")
    (tmp_path / "chat_template.jinja").write_text("T")
    differs = "; chat_template.json differs and was not used (--chat-template FILE chooses it)"
    assert template_metadata(tmp_path, None) == said("T", f"chat template: chat_template.jinja{differs}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "C"}))
    both = differs.replace("chat_template.json", "chat_template.jinja and chat_template.json", 1)
    assert template_metadata(tmp_path, None) == said("C", f"chat template: tokenizer_config.json{both}")
    assert template_metadata(tmp_path, chosen) == said("M", f"chat template: {chosen}")


def said(template: str, note: str) -> tuple[Metadata, list[str]]:
    return {"tokenizer.chat_template": string(template)}, [note]


def test_no_chat_template_is_said(tmp_path: Path) -> None:
    found, notes = template_metadata(tmp_path, None)
    assert found == {}
    assert notes[0].startswith("no chat template was found")


@pytest.mark.parametrize("as_list", [True, False])
def test_named_chat_templates_keep_their_names(tmp_path: Path, as_list: bool) -> None:
    if as_list:
        named = [{"name": "default", "template": "D"}, {"name": "tool use", "template": "U"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    else:
        (tmp_path / "chat_template.jinja").write_text("D")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool use.jinja").write_text("U")
    found, _ = template_metadata(tmp_path, None)
    assert {key: field.value for key, field in found.items()} == {
        "tokenizer.chat_template.tool_use": "U",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": "D",
    }


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        template_metadata(tmp_path, tmp_path / "absent.jinja")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="chat_template.jinja is not UTF-8 at byte 0"):
        template_metadata(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(BadInput, match="no text and no list of named texts"):
        template_metadata(tmp_path, None)
