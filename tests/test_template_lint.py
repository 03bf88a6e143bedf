"""What convert says about the chat template that it writes, found by rendering it."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3b_convert import convert, prepare
from a3b_convert.template_lint import lint_template
from a3b_gguf.errors import BadInput
from a3b_gguf.metadata import Metadata, array, string, u32
from templates import template_text
from tiny import Form, Sizes, write_checkpoint

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "a"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def metadata(template: str) -> Metadata:
    return {
        "tokenizer.chat_template": string(template),
        "tokenizer.ggml.tokens": array("str", TOKENS),
        "tokenizer.ggml.token_type": array("i32", [3, 3, 3, 4, 1]),
        "tokenizer.ggml.eos_token_id": u32(2),
    }


@pytest.mark.parametrize("name", ["tiny-a3b", "qwen3.5", "qwen3", "qwen3-coder", "qwq", "qwen2.5"])
def test_templates_of_the_family_are_clean(name: str) -> None:
    assert lint_template(metadata(template_text(name))) == []


def test_chatml_is_clean_and_no_template_is_no_matter_here() -> None:
    assert lint_template(metadata(CHATML)) == []
    assert lint_template({}) == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.split("{% if")[0], "the chat template opens no answer (add_generation_prompt changes nothing)"),
        ("{{ raise_exception('no') }}", "does not render a user message: chats cannot be served"),
        ("always the same", "does not render a user message"),
        (CHATML.replace("im_", "turn_"), "the chat template does not write <|im_start|> turns"),
        (CHATML.replace("im_", "turn_"), "writes <|turn_end|>, <|turn_start|>, which the tokenizer does not have as a token"),
        ("\n" + CHATML, "breaks rule R001"),
        (CHATML.replace("<|im_start|>{{", "{% if m.role == 'assistant' %}{{ raise_exception('none') }}{% endif %}<|im_start|>{{"), "none"),
        (CHATML.replace("{{ m.role }}", "{{ 'tester' if m.role == 'system' else m.role }}"), "R011"),
        (CHATML.replace("{{ m.content }}", "{{ '' if m.role == 'system' else m.content }}"), "breaks rule R006"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_note(template: str, said: str) -> None:
    assert said in " | ".join(lint_template(metadata(template)))


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'x' | no_such_filter }}", "{% if %}" * 3, "x" * 300_000])
def test_what_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(BadInput, match="the chat template has") as caught:
        lint_template(metadata(template))
    assert "--chat-template FILE" in caught.value.hint


def test_convert_lints_before_it_writes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", Form(mtp=False), Sizes(n_layer=1))
    assert any("opens no answer" in note for note in prepare(folder).notes)
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert not any("opens no answer" in note for note in prepare(folder, chat_template=tmp_path / "mine.jinja").notes)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(BadInput, match="syntax error in line 1"):
        convert(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
