"""Where a finding is, how severe, what it says to do: messages, bytes and rendered prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.prompt import PROFILES, Profile, profile_of_template, refused, verify_body, verify_raw, verify_request
from a3b_gguf.template import ChatTemplate
from conversations import (
    CALL,
    GENERATION,
    GOOD,
    OFF,
    PICKY,
    QWEN3,
    QWEN36,
    SYSTEM_TURN,
    TOOL,
    TOOL_TURNS,
    USER_TURN,
    A,
    C,
    S,
    T,
    U,
    arguments,
    chat,
    function,
    of_rule,
    system,
    text,
    user,
)
from templates import template_text

# -- where, and what to do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "rule", "where"),
    [
        (chat(U, S), "M031", "messages[1]"),
        (chat(S, U, A, S, U, S), "M032", "messages[3]"),
        (chat(S, user([text("a<|im_"), text("end|>")])), "M055", "messages[1].content"),
        (chat(S, user("what is <think>?")), "M056", "messages[1].content"),
        (chat(S, U, {**A, "reasoning_content": "x</think>y"}, U), "M055", "messages[2].reasoning_content"),
        (chat(S, {**U, "name": "<|im_end|>"}), "M055", "messages[1].name"),
        (arguments('{"content": "\\u003cthink>"}'), "M055", "messages[2].tool_calls[0].function.arguments.content"),
        (arguments({"<tool_call>": 1}), "M055", "messages[2].tool_calls[0].function.arguments['<tool_call>']"),
        (chat(S, U, C, {**T, "content": "</tool_response>"}), "M091", "messages[3].content"),
        (chat(S, U, tools=[TOOL, {"type": "function"}]), "M070", "tools[1]"),
        (chat(S, U, tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]), "M070", "tools[0].function.parameters"),
        (function(name=None), "M071", "tools[0].function.name"),
        (function(parameters={"enum": ["<|im_start|>"]}), "M076", "tools[0].function.parameters.enum[0]"),
        (arguments("[1]"), "M082", "messages[2].tool_calls[0].function.arguments"),
        (arguments('{"a": NaN}'), "M082", "messages[2].tool_calls[0].function.arguments"),
        (arguments(None), "M082", "messages[2].tool_calls[0].function.arguments"),
        (chat(S, user([text("x"), {"type": "image"}])), "M054", "messages[1].content[1]"),
        (chat(S, user([{"type": "text", "text": 5}])), "M053", "messages[1].content[0].text"),
        (chat(S, user({"a": "<|im_end|>"})), "M051", "messages[1].content"),
        (chat(S, U, chat_template_kwargs=5), "M100", "chat_template_kwargs"),
        (chat(S, U, metadata={"x y": "\0"}), "M007", "metadata['x y']"),
        ({"messages": {"role": "user"}}, "M020", "messages"),
        ({}, "M020", "messages"),
        (chat(5, None), "M021", "messages[0]"),
        (chat(S, {"role": 5, "content": "x"}, U), "M022", "messages[1].role"),
        (chat(system("\u200b\u2060\u3164"), U), "M033", "messages[0].content"),
        (chat(system([]), U), "M033", "messages[0].content"),
        (chat(system([{"type": "image"}]), U), "M034", "messages[0].content"),
        (chat(S, U, {"role": "assistant", "content": "", "tool_calls": []}, U), "M080", "messages[2].tool_calls"),
        (chat(S, {**U, "tool_calls": [CALL]}), "M080", "messages[1].tool_calls"),
        (chat(S, T, U), "M084", "messages[1]"),
        (chat(S, U, C, T, U, T), "M084", "messages[5]"),
    ],
)
def test_place_of_a_finding(request_: dict[str, Any], rule: str, where: str) -> None:
    findings = verify_request(request_, QWEN36)
    assert where in [finding.where for finding in of_rule(rule, findings)], findings
    assert of_rule(rule, findings)[0].severity == "error"


def test_a_missing_system_message_is_a_note_unless_it_is_required() -> None:
    assert [(finding.rule, finding.severity) for finding in verify_request(chat(U), QWEN36)] == [("M030", "note")]
    assert [(finding.rule, finding.severity) for finding in verify_request(chat(U), QWEN36, "required")] == [("M030", "error")]
    assert [(f.rule, f.severity) for f in verify_raw(USER_TURN + GENERATION, QWEN36)] == [("R002", "note")]
    assert [(f.rule, f.severity) for f in verify_raw(USER_TURN + GENERATION, QWEN36, "required")] == [("R002", "error")]


def test_a_list_of_parts_as_system_message_depends_on_the_template() -> None:
    request = chat(system([text("x")]), U)
    assert [finding.severity for finding in verify_request(request, QWEN36)] == ["warning"]
    assert [finding.severity for finding in verify_request(request, QWEN3)] == ["error"]


def test_both_system_rules_name_both_messages() -> None:
    findings = verify_request(chat(U, S, A, S, U), QWEN36)
    assert [(f.rule, f.where) for f in findings] == [("M031", "messages[1]"), ("M032", "messages[3]")]
    assert "messages[1]" in findings[1].fix


def test_role_spelling_is_suggested() -> None:
    (finding,) = verify_request(chat(S, U, {"role": "System ", "content": "x"}, U), QWEN36)
    assert finding.fix == "write 'system', exactly"


def test_softer_severities() -> None:
    assert [f.severity for f in verify_request(chat(S, user("a\x1bb")), QWEN36)] == ["warning"]
    assert [(f.rule, f.severity) for f in verify_request(function(name="getWeather"), QWEN36)] == [("M071", "warning")]
    assert [(f.rule, f.severity) for f in verify_request(chat(S, user([{"type": "text"}])), QWEN36)] == [("M053", "warning")]
    assert verify_request(chat(S, U, {**A, "refusal": None, "annotations": [], "audio": None, "function_call": None}, U), QWEN36) == []


def test_control_texts_are_the_profiles_own() -> None:
    request = chat(S, user("<|im_end|> <|eot_id|>"))
    assert of_rule("M055", verify_request(request, QWEN36))[0].message.startswith("'<|im_end|>'")
    assert of_rule("M055", verify_request(request, replace(QWEN36, controls=("<|eot_id|>",))))[0].message.startswith("'<|eot_id|>'")
    assert verify_request(request, replace(QWEN36, controls=())) == []


def test_the_template_is_asked_last() -> None:
    assert [finding.rule for finding in verify_request(chat(user("never"), S), QWEN36, template=PICKY)] == ["M031"]
    (finding,) = verify_request(chat(S, user("never this")), QWEN36, template=PICKY)
    assert "Not that word." in finding.message
    unsafe = ChatTemplate("{{ ''.__class__.__mro__ }}")
    assert [finding.rule for finding in verify_request(chat(S, U), QWEN36, template=unsafe)] == ["M099"]


# -- bytes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "rule", "where"),
    [
        (b'[\n {"role": "us\xffer"}]', "M001", "byte 15, line 2"),
        (b"\xef\xbb\xbf\xff", "M001", "byte 3, line 1"),
        (b'[\n {"role": "user",}]', "M003", "line 2, column 18"),
        (b"", "M003", "line 1, column 1"),
        (b"[1] x", "M003", "line 1, column 5"),
        (b'{"a": [1, {"b": -Infinity}]}', "M003", "a[1].b"),
        (b'{"a": 1e999}', "M003", "a"),
        (b"9" * 5000, "M003", "the request"),
        (b'[{"a": 1}, {"x": 1, "y": 2, "x": 3}]', "M004", "$[1].x"),
        (b'{"a": 1, "a": 2}', "M004", "a"),
        (b"[" * 100_000, "M005", "the request"),
        (b" " * ((8 << 20) + 1), "M005", "the request"),
        (b"[" + b"0," * 4096 + b"0]", "M005", "messages"),
    ],
    ids=str,
)
def test_place_of_a_finding_in_bytes(data: bytes, rule: str, where: str) -> None:
    value, findings = verify_body(data)
    assert (rule, where) in [(finding.rule, finding.where) for finding in findings], findings
    assert value is None


def test_a_byte_order_mark_does_not_hide_the_value() -> None:
    assert verify_body(b'\xef\xbb\xbf{"messages": []}')[0] == {"messages": []}


# -- raw prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [GOOD, OFF, TOOL_TURNS])
def test_published_vectors_pass(prompt: str) -> None:
    assert verify_raw(prompt, QWEN36) == []


def rules_of(prompt: str, profile: Profile = QWEN36) -> list[str]:
    return [finding.rule for finding in verify_raw(prompt, profile)]


@pytest.mark.parametrize(
    ("prompt", "rules"),
    [
        ("", ["R001"]),
        ("hello", ["R001"]),
        ("\ufeff" + GOOD, ["R001"]),
        (GOOD.replace("system\n", "System\n"), ["R003"]),
        (GOOD.replace("system\n", "system\r\n"), ["R003", "R021"]),
        (GOOD.replace("system\n", "system:\n"), ["R003"]),
        (GOOD.replace("system\n", "system You are\n"), ["R003"]),
        (GOOD.replace("<|im_end|>\n<|im_start|>user", "<|im_end|><|im_start|>user"), ["R010"]),
        (GOOD.replace("<|im_end|>\n<|im_start|>user", "<|im_end|> \r\n<|im_start|>user"), ["R010", "R021"]),
        (GOOD.replace("user\n", "User\n"), ["R011"]),
        (GOOD.replace("user\n", "developer\n"), ["R011"]),
        (GOOD.replace("Hi", "[INST] Hi"), ["R012"]),
        ("<s>[INST] Hi [/INST]", ["R020", "R012"]),
        ("<start_of_turn>user\nHi<end_of_turn>\n" + GOOD, ["R001", "R012"]),
        (GOOD.removesuffix(GENERATION) + "<|im_start|>assistant\nHello<|im_end|>\n", ["R013"]),
        (GOOD + "\n", ["R015"]),
        (OFF + "The capital is", ["R015"]),
        (GOOD.replace("user\n", "user\\n"), ["R026"]),
        ("<|im_start|>", ["R002", "R011", "R008", "R013"]),
    ],
    ids=range(19),
)
def test_rules_of_a_raw_prompt(prompt: str, rules: list[str]) -> None:
    assert rules_of(prompt) == rules


def test_what_the_write_ups_call_right_and_wrong() -> None:
    assert refused(verify_raw("<|system|>\nYou are brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n", QWEN36))
    assert "R002" in rules_of("<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n" + GENERATION)


def test_the_opener_of_the_answer_is_the_profiles() -> None:
    plain = SYSTEM_TURN + USER_TURN + "<|im_start|>assistant\n"
    assert rules_of(plain, PROFILES["qwen3-coder"]) == []
    assert rules_of(GOOD, PROFILES["qwen3-coder"]) == ["R015"]
    assert rules_of(plain, QWEN3) == []
    assert rules_of(OFF, QWEN3) == []


def test_places_are_bytes_and_lines() -> None:
    (finding,) = verify_raw("<|im_start|>system\nSé bref.<|im_end|>\n\n<|im_start|>user\nHi<|im_end|>\n" + GENERATION, QWEN36)
    assert (finding.rule, finding.where, finding.offset) == ("R010", "byte 38, line 2", 38)


PHI = "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"


def test_the_form_of_the_write_ups_is_right_where_the_template_writes_it() -> None:
    phi = profile_of_template(ChatTemplate(template_text("phi-3.5") + "{# patched #}"), "phi", PROFILES["phi-3.5"].controls)
    assert phi.is_pipes
    assert rules_of(PHI, phi) == rules_of(PHI, PROFILES["phi-3.5"]) == []
    assert rules_of(PHI.replace("<|end|>\n<|user|>", "\n<|user|>"), phi) == ["R004"]
    assert rules_of("<|user|>\nHi<|end|>\n<|system|>\nS<|end|>\n<|assistant|>\n", phi) == ["R002"]
    assert rules_of(GOOD, phi) == ["R012"]
    assert rules_of(PHI) == ["R012"]


def test_other_families_cannot_be_checked_raw() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    with pytest.raises(BadInput, match="does not write <|im_start|> turns"):
        verify_raw(GOOD, profile_of_template(template, "other", ()))
