"""`--fix`: what has one right mending is mended, everything else is left and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.prompt import PROFILES, SystemPolicy, fix_request, refused, verify_raw, verify_request
from a3b_gguf.prompt.fix_raw import fix_raw
from a3b_gguf.template import ChatTemplate
from command import assert_refused
from conversations import CALL, GENERATION, GOOD, OFF, QWEN36, SYSTEM_TURN, TOOL, USER_TURN, A, C, S, T, U, chat, system, text, user
from inside import inside as a3b
from templates import template_text

TEMPLATE = ChatTemplate(template_text("qwen3.6"))
BOTH = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "a1"}, {**CALL, "id": "a2"}]}
T1, T2 = {**T, "tool_call_id": "a1"}, {**T, "tool_call_id": "a2"}
NO_ID = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}

# what is broken, what it becomes
MENDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "M006": (chat(S, user("a\ud800b")), chat(S, user("a\ufffdb"))),
    "M007": (chat(S, user("a\0b")), chat(S, user("ab"))),
    "M008": (chat(S, user("a\u200bb\U000e0041")), chat(S, user("ab"))),
    "M009": (chat(S, user("a\r\nb\rc")), chat(S, user("a\nb\nc"))),
    "M023": (chat(S, {"role": "User ", "content": "Hi"}), chat(S, U)),
    "M026": (chat(S, {"role": "user", "text": "Hi"}), chat(S, U)),
    "M031": (chat(U, S), chat(S, U)),
    "M032": (chat(S, U, A, system("And kind."), U), chat(system("You are brief.\n\nAnd kind."), U, A, U)),
    "M033": (chat(system(" "), U), chat(U)),
    "M034": (chat(system([text("You are "), text("brief.")]), U), chat(S, U)),
    "M035": (chat(system("You are brief.\n"), U), chat(S, U)),
    "M042": (chat(S, U, user("there")), chat(S, user("Hi\n\nthere"))),
    "M050": (chat(S, U, C, {**T, "content": None}), chat(S, U, C, {**T, "content": ""})),
    "M051": (chat(S, user({"a": 1})), chat(S, user('{"a": 1}'))),
    "M053": (chat(S, user([text("Hi"), {"type": "text"}])), chat(S, user([text("Hi")]))),
    "M055": (chat(S, user("x<|im_end|>")), chat(S, user("x< |im_end|>"))),
    "M056": (
        chat(S, U, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, U),
        chat(S, U, {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}, U),
    ),
    "M057": (chat(S, user("<tool_call>")), chat(S, user("< tool_call>"))),
    "M062": (chat(S, U, {**A, "reasoning": "hm"}, U), chat(S, U, {**A, "reasoning_content": "hm"}, U)),
    "M070": (chat(S, U, tools=[TOOL["function"]]), chat(S, U, tools=[TOOL])),
    "M080": (chat(S, U, {**C, "tool_calls": CALL}, T), chat(S, U, C, T)),
    "M081": (
        chat(S, U, NO_ID, {"role": "tool", "content": "ok"}),
        chat(
            S,
            U,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call_2_0", "type": "function", **NO_ID["tool_calls"][0]}]},  # type: ignore[dict-item]
            {"role": "tool", "content": "ok", "tool_call_id": "call_2_0"},
        ),
    ),
    "M082": (
        chat(S, U, {**C, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": None}}]}, T),
        chat(S, U, {**C, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}"}}]}, T),
    ),
    "M087": (chat(S, U, BOTH, T2, T1), chat(S, U, BOTH, T1, T2)),
    "M091": (chat(S, U, C, {**T, "content": "</tool_response>"}), chat(S, U, C, {**T, "content": "< /tool_response>"})),
    "M100": (chat(S, U, chat_template_kwargs={"enable_thinking": "false"}), chat(S, U, chat_template_kwargs={"enable_thinking": False})),
    "M101": (chat(S, U, chat_template_kwargs={"hard": 1}), chat(S, U, chat_template_kwargs={})),
    "M103": (chat(S, U, chat_template_kwargs={"messages": []}), chat(S, U, chat_template_kwargs={})),
}
# One right mending does not exist: they stay.
LEFT: tuple[dict[str, Any], ...] = (
    chat(S), chat(S, U, A), chat(S, U, T), chat(S, U, C, T, T), chat(S, user(None)), chat({"role": "developer", "content": "x"}, U),
    chat(S, U, {**C, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": '}}]}, T), {"messages": {}}, {},
    chat(5), chat(S, {"role": "wizard", "content": "x"}), chat(S, U, tools={"f": 1}), chat(S, user([{"type": "image"}])),
)  # fmt: skip


def check(request: Any, policy: SystemPolicy = "optional") -> Any:
    return verify_request(request, QWEN36, policy)


@pytest.mark.parametrize("rule", MENDED)
def test_mended(rule: str) -> None:
    broken, right = MENDED[rule]
    before = json.dumps(broken)
    fixed = fix_request(broken, QWEN36, check)
    assert fixed.value == right
    assert rule in {change.rule for change in fixed.changes}
    assert not refused(fixed.left)
    assert json.dumps(broken) == before, "what was given is not changed"


@pytest.mark.parametrize("request_", LEFT, ids=range(len(LEFT)))
def test_left_alone(request_: dict[str, Any]) -> None:
    fixed = fix_request(request_, QWEN36, check)
    assert fixed.value == request_
    assert refused(fixed.left)
    assert fixed.changes == ()


def test_developer_is_mapped_only_when_asked() -> None:
    request = chat({"role": "developer", "content": "Be kind."}, U)
    fixed = fix_request(request, QWEN36, lambda value: verify_request(value, QWEN36, developer="system"), "system")
    assert fixed.value == chat(system("Be kind."), U)


RAW: dict[str, tuple[str, str]] = {
    "R001": ("\ufeff\n" + GOOD, GOOD),
    "R003": (GOOD.replace("system\n", " System:\n"), GOOD),
    "R004": (GOOD.replace("Be brief.<|im_end|>\n", "Be brief.\n"), GOOD),
    "R007": (GOOD.replace("Be brief.", "\nBe brief.  "), GOOD),
    "R008": (GOOD.replace("Hi<|im_end|>\n", "Hi\n"), GOOD),
    "R010": (GOOD.replace("<|im_end|>\n<|im_start|>user", "<|im_end|> \n\n<|im_start|>user"), GOOD),
    "R011": (GOOD.replace("user\n", "User\n"), GOOD),
    "R013": (SYSTEM_TURN + USER_TURN.removesuffix("\n"), GOOD),
    "R014": (GOOD.removesuffix("\n"), GOOD),
    "R015": (OFF + " \n", OFF),
    "R021": (GOOD.replace("\n", "\r\n"), GOOD),
    "R026": (GOOD.replace("\n", "\\n"), GOOD),
}


@pytest.mark.parametrize("rule", RAW)
def test_raw_mended(rule: str) -> None:
    broken, right = RAW[rule]
    assert rule in {finding.rule for finding in verify_raw(broken, QWEN36)}
    fixed = fix_raw(broken, QWEN36, lambda value: verify_raw(value, QWEN36, template=TEMPLATE))
    assert fixed.value == right, fixed
    assert not refused(fixed.left)


@pytest.mark.parametrize(
    "prompt", ["", "hello", "<|system|>\nx<|end|>\n", GOOD.replace("user", "tool"), USER_TURN + SYSTEM_TURN + GENERATION]
)
def test_raw_left_alone(prompt: str) -> None:
    fixed = fix_raw(prompt, QWEN36, lambda value: verify_raw(value, QWEN36))
    assert fixed.value == prompt
    assert refused(fixed.left)


# -- files -----------------------------------------------------------------------------------------------------------------------------


def test_in_place_and_to_another_file(tmp_path: Path) -> None:
    file = tmp_path / "late.json"
    file.write_text(json.dumps([U, S], indent=2) + "\n", encoding="utf-8")
    file.chmod(0o640)
    other = tmp_path / "fixed.json"
    done = a3b("verify-prompt", file, "--fix", "-o", other)
    assert (done.returncode, json.loads(other.read_text()), json.loads(file.read_text())) == (0, [S, U], [U, S])
    done = a3b("verify-prompt", file, "--fix")
    assert done.stdout == "M031 mended messages[1]: was moved to the front\nprofile qwen3.6: 1 change, ok, left: no findings\n"
    assert file.read_text() == json.dumps([S, U], indent=2) + "\n"
    assert (file.stat().st_mode & 0o777, sorted(path.name for path in tmp_path.iterdir())) == (0o640, ["fixed.json", "late.json"])


def test_what_is_left_refuses(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([U, S, A]), encoding="utf-8")
    done = a3b("verify-prompt", file, "--fix", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], [change["rule"] for change in report["changes"]]) == (1, False, ["M031"])
    assert [finding["rule"] for finding in report["findings"]] == ["M044"]
    assert json.loads(file.read_text()) == [S, U, A]


def test_standard_input_and_raw() -> None:
    done = a3b("verify-prompt", "--fix", given=json.dumps([U, S]))
    assert (done.returncode, json.loads(done.stdout)) == (0, [S, U])
    assert "M031 mended" in done.stderr
    done = a3b("verify-prompt", "--fix", "--raw", given=GOOD.removesuffix(GENERATION))
    assert (done.returncode, done.stdout) == (0, GOOD)


def test_a_data_set(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join([json.dumps([S, U]), "not json", json.dumps({"messages": [U, S], "id": 7}), ""]), encoding="utf-8")
    done = a3b("verify-prompt", file, "--fix")
    assert done.returncode == 1
    assert "line 3: M031 mended messages[1]" in done.stdout
    assert [*file.read_text().splitlines()] == [json.dumps([S, U]), "not json", json.dumps({"messages": [S, U], "id": 7})]


def test_contradictions(tmp_path: Path) -> None:
    assert_refused(a3b("verify-prompt", "--fix", "--render", given="[]"), 2, "one of them at a time")
    assert_refused(a3b("verify-prompt", "-o", tmp_path / "x", given="[]"), 2, "-o has no meaning without --fix")
    assert PROFILES["qwen3.6"] == QWEN36
