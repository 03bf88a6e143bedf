"""general.*: names taken apart, sizes, sampling and model cards, compared with gguf-py, which reads them for llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import Metadata as TheirMetadata
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_convert import open_checkpoint
from a3b_convert.names import parse_name
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import KINDS, Field, Metadata
from tiny import Form, Sizes, write_checkpoint

WORDS = "Qwen3 Qwen3.6 Coder 30B A3B 3b 7b1 8x7B 128K 1_5B mini large XL Instruct chat Thinking 2507 v2 iter3 Q4_K FP16 2 x a3b lora"
PARTS = st.sampled_from(WORDS.split())
CARDS = {
    "none": None,
    "no front matter": "# A model\n---\nlicense: mit\n---\n",
    "as published": """---
library_name: transformers
license: apache-2.0
license_link: https://huggingface.co/Qwen/Qwen3.5-35B-A3B/blob/main/LICENSE
pipeline_tag: image-text-to-text
base_model:
- Qwen/Qwen3.5-35B-A3B-Base
---
# Qwen
""",
    "merge of two": """---
license: other
license_name: mine
base_model: [Qwen/Qwen3-30B-A3B, "https://huggingface.co/acme/Some-Thing-7B", "https://example.com/x"]
tags:
- moe
- no
language:
- en
- no
---
""",
    "one base, empty tags": "---\nbase_model: Qwen3-30B-A3B\ntags:\nlicense: [mit, bsd]\nlanguages: de\n---\n",
}


def theirs(folder: Path, n_params: int, size_label: str, arch: str) -> Metadata:
    """What gguf-py's Metadata writes for the folder, in its order."""
    writer = gguf.GGUFWriter(None, arch)
    writer.add_type(gguf.GGUFType.MODEL)
    found = TheirMetadata.load(None, folder, None, n_params)
    found.size_label = found.size_label or size_label
    found.set_gguf_meta_model(writer)
    kind = {value: name for name, (value, _, _) in KINDS.items()}
    return {key: Field(kind[v.type.value], v.value, "str" if isinstance(v.value, list) else "") for key, v in writer.kv_data[0].items()}


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=6), st.sampled_from(["", "Qwen/", "./"]), st.sampled_from([0, 12_000_000, 30_000_000_000]))
def test_names_come_apart_as_in_gguf_py(parts: list[str], organization: str, n_params: int) -> None:
    model_id = organization + "-".join(parts)
    name = parse_name(model_id, n_params)
    ours = (name.full, name.organization, name.basename, name.finetune, name.version, name.size_label)
    assert ours == tuple(part or "" for part in TheirMetadata.get_model_id_components(model_id, n_params))
    assert name.title == TheirMetadata.id_to_title(name.full)


@pytest.mark.parametrize("folder_name", ["tiny-a3b", "Qwen3.6-35B-A3B", "Qwen3-30B-A3B-Instruct-2507", "A model with spaces", "x"])
@pytest.mark.parametrize("card", CARDS)
def test_general_keys_are_those_of_gguf_py(tmp_path: Path, folder_name: str, card: str) -> None:
    folder = write_checkpoint(tmp_path / folder_name, Form(mtp=False), Sizes(n_layer=1))
    sampling = {"top_k": 20, "top_p": 0.95, "temperature": 1, "repetition_penalty": 1.05, "min_p": None, "eos_token_id": [258]}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    if text := CARDS[card]:
        (folder / "README.md").write_text(text)
    model = open_checkpoint(folder)
    shapes = [tensor.shape for tensor in model.tensors]
    n_params = sum(int(np.prod(shape)) for shape in shapes)
    experts = sum(int(np.prod(shape)) for shape in shapes if len(shape) == 3)
    label = gguf.size_label(n_params, n_params - experts, experts // 4, 4)
    wanted = theirs(folder, n_params, label, "qwen35moe")
    ours = {
        key: field for key, field in model.metadata.items() if key in wanted or key.startswith(("general.base", "general.l", "general.t"))
    }
    assert list(ours) == list(wanted)
    assert ours == wanted


def test_a_card_that_is_no_yaml_is_a_note_and_no_failure(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False), Sizes(n_layer=1))
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n")
    model = open_checkpoint(folder)
    assert any("front matter of README.md is not YAML" in note for note in model.notes)
    assert "general.license" not in model.metadata


def test_sampling_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False), Sizes(n_layer=1))
    (folder / "generation_config.json").write_text('{"top_k": "many"}')
    with pytest.raises(BadInput, match=r"generation_config\.json: key top_k is 'many', expected a whole number"):
        open_checkpoint(folder)
