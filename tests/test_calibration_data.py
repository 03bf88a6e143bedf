"""The text of a calibration: files, our own, the model's template, and chunks in a fair order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.flows.prompts import chat_template_of
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.template import TemplateRefused
from a3b_quantize.calibration_data import BUILTIN_NAME, Source, builtin, chunks, read_sources

Messages = Sequence[Mapping[str, Any]]


def plain(messages: Messages, tools: Messages | None) -> str:
    return "|".join(f"{each['role']}:{each['content']}" for each in messages) + (f"|{len(tools)} tools" if tools else "")


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def source(name: str, *documents: str) -> Source:
    return Source(name, "".join(documents).encode(), documents)


def test_a_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<|im_start|>user\nä\n\n", encoding="utf-8")
    assert read_sources([str(tmp_path / "a.txt")], plain)[0].documents == ("<|im_start|>user\nä\n\n",)


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}], "tools": [{}, {}]}]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert read_sources([str(path)], plain)[0].documents == ("one", "user:two|2 tools")


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "line 2: Expecting"), ("[]", "line 2 has neither a text nor messages"), ('{"messages": []}', "neither a text nor messages"),
     ('{"messages": ["hi"]}', "neither a text nor messages"), ('{"text": 3}', "neither a text nor messages")],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(BadInput, match=f"a.jsonl, {said}|a.jsonl, line 2 has {said}"):
        read_sources([str(path)], plain)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_sources([str(tmp_path / "none.txt")], plain)
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(BadInput, match="a.txt: byte 3 is not UTF-8"):
        read_sources([str(tmp_path / "a.txt")], plain)
    (tmp_path / "b.txt").write_text("too short")
    with pytest.raises(BadInput, match="fewer than 16 tokens"):
        chunks(read_sources([str(tmp_path / "b.txt")], plain), letters, 64)


def test_a_conversation_that_the_template_refuses_is_left_out_with_a_note(tmp_path: Path) -> None:
    def strict(messages: Messages, tools: Messages | None) -> str:
        if tools:
            raise TemplateRefused("it knows no tools")
        return plain(messages, tools) + "." * 32

    path = tmp_path / "a.jsonl"
    row = {"messages": [{"role": "user", "content": "x"}]}
    path.write_text("\n".join(json.dumps(each) for each in (row, {**row, "tools": [{}]}, {**row, "tools": [{}]})))
    found = chunks(read_sources([str(path)], strict), letters, 64)
    assert found.n_tokens == len("user:x") + 32
    assert found.notes == (
        f"2 conversations were left out, since the model's template does not take them; the first: {path}, line 2: it knows no tools",
    )


def test_any_beginning_holds_every_source_in_its_share() -> None:
    long, short = source("long", "a" * 16 * 40), source("short", "b" * 16 * 10)
    found = chunks([long, short], letters, 16)
    assert len(found.tokens) == 50
    for n in (5, 10, 25, 40):
        assert abs(sum(chunk[0] == ord("b") for chunk in found.tokens[:n]) - n / 5) <= 1
    ordered = chunks([source("x", "".join(chr(i) for i in range(100, 180)))], letters, 16)
    assert [chunk[0] for chunk in ordered.tokens] == [100, 116, 132, 148, 164]


def test_a_rest_of_a_text_is_used_unless_it_is_tiny() -> None:
    assert [len(chunk) for chunk in chunks([source("x", "a" * 148)], letters, 64).tokens] == [64, 64, 20]
    assert [len(chunk) for chunk in chunks([source("x", "a" * 140)], letters, 64).tokens] == [64, 64]


def test_a_first_token_stands_before_each_chunk() -> None:
    """As llama.cpp's imatrix tool has it: one before the text, and one in place of each later chunk's first token."""
    found = chunks([source("x", "".join(chr(i) for i in range(100, 147)))], letters, 16, bos=1).tokens
    assert found == ((1, *range(100, 115)), (1, *range(116, 131)), (1, *range(132, 147)))


def test_the_built_in_text(tiny_bf16: Path) -> None:
    """Every conversation goes through the embedded model's strict template, and no two documents are the same."""
    template = chat_template_of(read_gguf(tiny_bf16))
    sources = read_sources((), lambda messages, tools: template.render(messages, tools, add_generation_prompt=False))
    assert {each.name.partition("/")[2] for each in sources} == {name for name, _ in builtin()} >= {
        "chat.jsonl", "code.jsonl", "languages.jsonl", "prose.jsonl", "reasoning.jsonl", "tools.jsonl"
    }  # fmt: skip
    assert not [reason for each in sources for reason in each.refused]
    documents = [document for each in sources for document in each.documents]
    assert len(set(documents)) == len(documents)
    text = "".join(documents)
    assert len(text) > 100_000
    for part in ("<|im_start|>assistant", "<think>", "<tool_call>", "```python", "中文", "По", "def ", "\\n"):
        assert part in text, part
    found = chunks(sources, letters, 512)
    assert found.name == BUILTIN_NAME


def test_builtin_can_be_one_of_several(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("m" * 64)
    found = chunks(read_sources(["builtin", str(tmp_path / "mine.txt")], plain_or_empty), letters, 512)
    assert found.name == f"{BUILTIN_NAME} + mine.txt"


def plain_or_empty(messages: Messages, tools: Messages | None) -> str:
    return "".join(str(each.get("content")) for each in messages)
