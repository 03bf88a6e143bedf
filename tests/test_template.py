"""Templates render as Hugging Face renders them, refuse in their own words, and stay in their sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.template import MAX_TEMPLATE_CHARS, BadTemplate, ChatTemplate, TemplateRefused, ends_in_thinking
from templates import NAMES, template_text

GOLDEN = json.loads((Path(__file__).parent / "golden" / "renders_transformers.json").read_text(encoding="utf-8"))
S, U = {"role": "system", "content": "S"}, {"role": "user", "content": "hi"}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=[case["case"] for case in GOLDEN["cases"]])
@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers_does(name: str, case: dict[str, Any]) -> None:
    expected = GOLDEN["renders"][name][case["case"]]
    template = ChatTemplate(template_text(name))
    if expected is None:
        with pytest.raises(TemplateRefused):
            template.render(case["messages"], case["tools"], True, case["options"])
    else:
        assert template.render(case["messages"], case["tools"], True, case["options"]) == expected


def test_published_vectors_of_qwen36() -> None:
    template = ChatTemplate(template_text("qwen3.6"))
    head = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([S, U]) == head + "<think>\n"
    assert template.render([S, U], options={"enable_thinking": False}) == head + "<think>\n\n</think>\n\n"
    assert template.render([S, U], add_generation_prompt=False) == head.removesuffix("<|im_start|>assistant\n")
    call = {"name": "get_weather", "arguments": {"city": "P", "b": True}}
    turn = {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [{"type": "function", "id": "1", "function": call}]}
    results = [{"role": "tool", "content": "ok"}, {"role": "tool", "content": "ok2"}]
    assert template.render([{"role": "user", "content": "q"}, turn, *results]) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nR\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        "P\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nok\n"
        "</tool_response>\n<tool_response>\nok2\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "No messages provided"),
        ([S], "No user query found"),
        ([U, S], "System message must be at the beginning"),
        ([{"role": "developer", "content": "S"}, U], "Unexpected message role"),
        ([{"role": "user", "content": 5}], "Unexpected content type"),
        ([U, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "TypeError"),
    ],
)
def test_refusals_keep_the_templates_words(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(TemplateRefused, match=words):
        ChatTemplate(template_text("qwen3.5")).render(messages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for", "syntax error in line 1"),
        ("ok\n{{ x | from_json }}", "syntax error in line 2: No filter named 'from_json'"),
        ("{{ 1 }}" * MAX_TEMPLATE_CHARS, "characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ],
    ids=["syntax", "filter", "size", "depth"],
)
def test_bad_templates(text: str, words: str) -> None:
    with pytest.raises(BadTemplate, match=words):
        ChatTemplate(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ (raise_exception | attr('__globals__'))['json'] }}",
    ],
)
def test_the_sandbox_holds(text: str) -> None:
    messages = [dict(U)]
    with pytest.raises((BadTemplate, TemplateRefused)):
        ChatTemplate(text).render(messages)
    assert messages == [U]


def test_a_template_that_leaves_its_sandbox_is_bad_input_not_a_refusal() -> None:
    with pytest.raises(BadInput, match="sandbox"):
        ChatTemplate("{{ ''.__class__.__mro__ }}").render([U])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "raise_exception", "bos_token"])
def test_options_cannot_replace_what_is_the_renderers(name: str) -> None:
    with pytest.raises(TemplateRefused, match=name):
        ChatTemplate("x").render([U], options={name: []})


def test_what_templates_are_written_for() -> None:
    assert ChatTemplate("{{ {'a': '<ü>'} | tojson }}").render([]) == '{"a": "<ü>"}'
    assert ChatTemplate("{{ [1] | tojson(indent=2) }}").render([]) == "[\n  1\n]"
    assert ChatTemplate("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render([]) == "1"
    assert ChatTemplate("{% generation %}x{% endgeneration %}").render([]) == "x"
    assert ChatTemplate("  {% if true %}\nx\n  {% endif %}\n").render([]) == "x\n"
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])) == 10
    assert ChatTemplate("{{ bos_token }}|{{ eos_token }}", "<s>", "</s>").render([]) == "<s>|</s>"


def test_variables_are_the_options_that_can_have_an_effect() -> None:
    assert ChatTemplate(template_text("tiny-a3b")).variables == {"enable_thinking"}
    assert {"enable_thinking", "preserve_thinking", "add_vision_id"} <= ChatTemplate(template_text("qwen3.6")).variables
    assert "messages" not in ChatTemplate(template_text("qwen2.5")).variables


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\nIt was", True),
        ("<think>", True),
        ("", False),
    ],
)
def test_ends_in_thinking(prompt: str, expected: bool) -> None:
    assert ends_in_thinking(prompt) is expected
