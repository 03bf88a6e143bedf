"""Profiles found by rendering, and what a verified request becomes before a template sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from a3b_gguf.errors import UsageError
from a3b_gguf.prompt import PROFILES, normalise, profile_named, profile_of_template, render_request, verify_raw
from a3b_gguf.prompt.profiles import QWEN_CONTROLS
from a3b_gguf.template import BadTemplate, ChatTemplate
from conversations import TOOL, C, S, T, chat, text, user
from templates import template_text

# -- profiles ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3.6", "qwen3.5", "qwen3", "qwen3-coder"])
def test_shipped_profiles_are_what_the_templates_do(name: str) -> None:
    assert profile_of_template(ChatTemplate(template_text(name)), name, QWEN_CONTROLS) == PROFILES[name]


def test_profiles_of_other_templates() -> None:
    probed = {name: profile_of_template(ChatTemplate(template_text(name)), name, ()) for name in ("tiny-a3b", "qwq", "qwen2.5", "phi-3.5")}
    assert probed["tiny-a3b"] == replace(
        PROFILES["qwen3.6"],
        name="tiny-a3b",
        controls=(),
        list_content=False,
        preserve="always",
        variables=frozenset({"enable_thinking"}),
    )
    assert probed["qwq"].generation_off == "<|im_start|>assistant\n<think>\n</think>"
    assert (probed["qwen2.5"].call_style, probed["qwen2.5"].thinks) == ("json", False)
    assert not probed["phi-3.5"].is_chatml
    assert probed["phi-3.5"].generation_on == "<|assistant|>\n"


@pytest.mark.parametrize("text_", ["", "{{ raise_exception('no') }}", "constant"])
def test_a_template_that_shows_no_question_is_refused(text_: str) -> None:
    with pytest.raises(BadTemplate, match=r"x.gguf does not render a user message"):
        profile_of_template(ChatTemplate(text_), "x.gguf", ())


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(UsageError) as error:
        profile_named("llama")
    assert all(name in error.value.hint for name in PROFILES)


# -- what a request becomes ------------------------------------------------------------------------------------------------------


def test_normalise() -> None:
    messages = [S, user([text("a"), text("b")]), {**C, "refusal": None}, T]
    assert normalise(messages) == [
        S,
        user("ab"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        T,
    ]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', "what was given is not changed"


@pytest.mark.parametrize("name", ["qwen3.6", "qwen3.5", "qwen3", "qwen3-coder", "qwen2.5", "tiny-a3b"])
def test_every_template_renders_a_normalised_request(name: str) -> None:
    """String arguments, null content and lists of parts each crash some of these templates when they are handed over as they are."""
    request = chat(S, user([text("Hi")]), C, T, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
    template = ChatTemplate(template_text(name))
    prompt = render_request(template, request)
    assert "Hi<|im_end|>" in prompt
    assert verify_raw(prompt, profile_of_template(template, name, ())) == []
    assert ('"arguments": {"a": 1}' if name in ("qwen3", "qwen2.5") else "<parameter=a>\n1\n</parameter>") in prompt
