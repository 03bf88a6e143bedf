"""200 conversations with each template, rendered as Hugging Face renders them; every prompt taken apart and rendered again to itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.prompt import PROFILES, profile_of_template, refused, render_request, verify_raw, verify_request
from a3b_gguf.prompt.profiles import QWEN_CONTROLS
from a3b_gguf.template import ChatTemplate, GuardedTemplate, published_names, published_text
from chats import conversations
from templates import NAMES, template_text

GOLDEN = json.loads((Path(__file__).parent / "golden" / "conversations_transformers.json").read_text(encoding="utf-8"))
LLAMA_CPP = json.loads((Path(__file__).parent / "golden" / "renders_llama_cpp.json").read_text(encoding="utf-8"))
CHATS = conversations(GOLDEN["seed"], 200)
FAMILY = [name for name in NAMES if name not in ("phi-3.5", "chatml")]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def render(template: Any, chat: dict[str, Any]) -> str:
    return str(template.render(chat["messages"], chat["tools"], True, chat["chat_template_kwargs"]))


def test_the_conversations_are_those_of_the_golden_file() -> None:
    assert digest(json.dumps(CHATS)) == GOLDEN["chats"]


@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers_does(name: str) -> None:
    template = ChatTemplate(template_text(name))
    differ = [
        index
        for index, (chat, want) in enumerate(zip(CHATS, GOLDEN["renders"][name], strict=True))
        if digest(render(template, chat)) != want
    ]
    assert not differ


@pytest.mark.parametrize("case", LLAMA_CPP["cases"], ids=[case["name"].split()[0] for case in LLAMA_CPP["cases"]])
def test_renders_as_llama_cpp_does(case: dict[str, str]) -> None:
    """Templates of other families, from llama.cpp's own test: what its engine writes, ours writes."""
    template = ChatTemplate(case["template"], case["bos"], case["eos"])
    assert template.render(LLAMA_CPP["messages"]) == case["expected"]


@pytest.mark.parametrize("name", FAMILY)
def test_a_request_that_passes_becomes_a_prompt_that_passes(name: str) -> None:
    """Messages without errors give a prompt without errors, and the round trip through the prompt gives it again."""
    template = ChatTemplate(template_text(name))
    profile = profile_of_template(template, name, QWEN_CONTROLS)
    for chat in CHATS[:60]:
        assert not refused(verify_request(chat, profile)), chat
        prompt = render_request(template, chat)
        assert prompt == render(template, chat)
        findings = verify_raw(prompt, profile, template=template)
        assert not [f for f in findings if f.severity == "error" or f.rule == "R025"], (prompt, findings)


def test_a_guarded_template_renders_the_same() -> None:
    guarded = GuardedTemplate(template_text("qwen3.6") + "{# patched #}")
    try:
        assert [digest(render(guarded, chat)) for chat in CHATS[:40]] == GOLDEN["renders"]["qwen3.6"][:40]
    finally:
        guarded.close()


def test_every_shipped_profile_has_its_template() -> None:
    assert set(published_names()) == set(PROFILES)
    for name in PROFILES:
        assert published_text(name) == template_text(name)
