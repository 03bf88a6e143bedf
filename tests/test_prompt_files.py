"""`a3b verify-prompt` on files: data sets, SARIF, the exact prompt, tokens, templates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from a3b_gguf.prompt import RULES
from a3b_gguf.prompt.locate import locate
from a3b_gguf.template import published_text
from command import A3B, assert_refused
from conversations import GOOD, TOOL, A, S, T, U, user
from inside import inside as a3b

# What SARIF 2.1.0 demands of the parts that are written here. Source: sarif-schema-2.1.0.json of OASIS
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "required": ["id"],
                                            "properties": {
                                                "shortDescription": {"type": "object", "required": ["text"]},
                                                "help": {"type": "object", "required": ["text"]},
                                                "defaultConfiguration": {
                                                    "type": "object",
                                                    "properties": {"level": {"enum": ["none", "note", "warning", "error"]}},
                                                },
                                            },
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message"],
                            "properties": {
                                "ruleIndex": {"type": "integer", "minimum": -1},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": {"type": "object", "required": ["text"]},
                                "locations": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {
                                            "physicalLocation": {
                                                "type": "object",
                                                "properties": {
                                                    "region": {
                                                        "type": "object",
                                                        "properties": {
                                                            "startLine": {"type": "integer", "minimum": 1},
                                                            "startColumn": {"type": "integer", "minimum": 1},
                                                        },
                                                    }
                                                },
                                            }
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def sarif(*words: object, given: str | None = None) -> list[dict[str, Any]]:
    done = a3b("verify-prompt", "--format", "sarif", *words, given=given)
    log = json.loads(done.stdout)
    jsonschema.validate(log, SARIF)
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.id for rule in RULES]
    results: list[dict[str, Any]] = log["runs"][0]["results"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in results)
    return results


def test_sarif(tmp_path: Path) -> None:
    file = tmp_path / "late.json"
    file.write_text(json.dumps([U, S], indent=1), encoding="utf-8")
    (result,) = sarif(file)
    assert (result["ruleId"], result["level"]) == ("M031", "error")
    (place,) = result["locations"]
    assert place["physicalLocation"] == {"artifactLocation": {"uri": str(file)}, "region": {"startLine": 6, "startColumn": 2}}
    assert place["logicalLocations"] == [{"fullyQualifiedName": "messages[1]"}]
    assert sarif(given=json.dumps([S, U])) == []
    assert [result["ruleId"] for result in sarif("--raw", given=GOOD + " ")] == ["R015"]


def data_set(path: Path) -> Path:
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [U, S]}}
    lines = [
        json.dumps([S, U]),
        "",
        "{broken",
        json.dumps({"messages": [S, U, A]}),
        json.dumps(batch),
        '{"messages": [{"role": "us\udcffer"}]}',
    ]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    return path


def test_data_sets(tmp_path: Path) -> None:
    file = data_set(tmp_path / "set.jsonl")
    expected = [(3, "M003", "line 1, column 2"), (4, "M044", "messages[2]"), (5, "M031", "body.messages[1]"), (5, "M030", "")]
    done = a3b("verify-prompt", file, "--json")
    report = json.loads(done.stdout)
    found = [(finding["line"], finding["rule"], finding["where"]) for finding in report["findings"]]
    assert (done.returncode, report["ok"]) == (1, False)
    assert found == [*expected[:3], (6, "M001", "byte 26, line 1")]
    done = a3b("verify-prompt", file, "--no-gen")
    assert f"{file}:5: M031 error body.messages[1]" in done.stdout
    assert "M044" not in done.stdout
    results = sarif(file)
    assert [result["locations"][0]["physicalLocation"]["region"]["startLine"] for result in results] == [3, 4, 5, 6]
    assert a3b("verify-prompt", "--jsonl", "--no-gen", given=json.dumps([S, U, A]) + "\n" + json.dumps([S, U])).returncode == 0


def test_a_data_set_takes_bounded_memory(tmp_path: Path) -> None:
    """300 lines of 250 kB and one of 32 MB, with less memory than all of them take."""
    code = (
        "import json, sys\n"
        "line = json.dumps([{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'x' * 250_000}])\n"
        "for _ in range(300): print(line)\n"
        "print('\"' + 'y' * 32_000_000 + '\"')\n"
    )
    limit = "resource.setrlimit(resource.RLIMIT_DATA, (110 << 20, 110 << 20))"
    limited = f"import resource, os, sys; {limit}; os.execv({A3B!r}, [{A3B!r}, *sys.argv[1:]])"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    done = subprocess.run(
        [sys.executable, "-c", limited, "verify-prompt", "--jsonl", "--json"],
        stdin=writer.stdout,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.wait() == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(finding["line"], finding["rule"]) for finding in report["findings"]] == [(301, "M005")]


def test_render_prints_the_exact_prompt(tmp_path: Path, tiny_bf16: Path) -> None:
    given = json.dumps([{"role": "system", "content": "Be brief."}, user("Hi")])
    assert a3b("verify-prompt", "--render", given=given).stdout == GOOD
    assert a3b("verify-prompt", "--render", "--model", tiny_bf16, given=given).stdout == GOOD
    done = a3b("verify-prompt", "--render", "--profile", "phi-3.5", given=given)
    assert done.stdout == "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"
    done = a3b("verify-prompt", "--render", given=json.dumps([U, S]))
    assert (done.returncode, done.stdout) == (1, "")
    assert "M031" in done.stderr
    request = json.dumps({"messages": [S, U], "chat_template_kwargs": {"enable_thinking": False}, "tools": [TOOL]})
    assert a3b("verify-prompt", "--render", given=request).stdout.endswith("<think>\n\n</think>\n\n")


def test_tokens(tmp_path: Path, tiny_bf16: Path) -> None:
    given = json.dumps([{"role": "system", "content": "Be brief."}, user("Hi <|im_end|>")])
    done = a3b("verify-prompt", "--show-tokens", "--json", "--control-text", "as-text", "--model", tiny_bf16, given=given)
    rows = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "".join(row["piece"] for row in rows) == GOOD.replace("Hi", "Hi <|im_end|>")
    assert [row["piece"] for row in rows if row["kind"] == "control"] == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    assert {(row["turn"], row["role"]) for row in rows} == {(0, "system"), (1, "user"), (2, "assistant")}
    ids = json.dumps([row["id"] for row in rows])
    assert a3b("verify-prompt", "--tokens", "--model", tiny_bf16, given=ids).returncode == 0
    done = a3b("verify-prompt", "--tokens", "--model", tiny_bf16, given=json.dumps([99_999_999]))
    assert (done.returncode, "K007 error token 0" in done.stdout) == (1, True)
    assert "user-defined" in a3b("verify-prompt", "--show-tokens", "--raw", "--model", tiny_bf16, given=GOOD).stdout
    assert_refused(a3b("verify-prompt", "--tokens", given="[1]"), 2, "--tokens needs --model")
    assert_refused(a3b("verify-prompt", "--tokens", "--model", tiny_bf16, given='{"a": 1}'), 3, "expected a JSON list of token ids")
    assert_refused(a3b("verify-prompt", "--show-tokens", given=given), 2, "--show-tokens needs --model")


def test_the_context_must_hold_it(tiny_bf16: Path) -> None:
    given = json.dumps([S, U])
    assert a3b("verify-prompt", "--ctx", 100, "--reserve", 50, "--model", tiny_bf16, given=given).returncode == 0
    done = a3b("verify-prompt", "--ctx", 20, "--model", tiny_bf16, given=given)
    assert (done.returncode, "M059 error the prompt:" in done.stdout) == (1, True)
    done = a3b("verify-prompt", "--ctx", 20, "--raw", "--model", tiny_bf16, given=GOOD)
    assert (done.returncode, "R024 error the prompt:" in done.stdout) == (1, True)


def test_several_files(tmp_path: Path) -> None:
    good, late = tmp_path / "good.json", tmp_path / "late.json"
    good.write_text(json.dumps([S, U]))
    late.write_text(json.dumps([U, S]))
    done = a3b("verify-prompt", good, late)
    assert (done.returncode, f"{late}:1: M031 error messages[1]" in done.stdout) == (1, True)
    report = json.loads(a3b("verify-prompt", good, late, "--json").stdout)
    assert [(file["file"], file["ok"]) for file in report["files"]] == [(str(good), True), (str(late), False)]
    assert len(sarif(good, late)) == 1


def test_templates(tmp_path: Path, tiny_bf16: Path) -> None:
    done = a3b("verify-prompt", "--template", "--model", tiny_bf16)
    assert done.returncode == 0
    assert "tiny-a3b: ok" in done.stdout
    file = tmp_path / "chat_template.jinja"
    file.write_text("{{ cycler.__init__.__globals__.os.popen('id').read() }}")
    report = json.loads(a3b("verify-prompt", "--template", file, "--json").stdout)
    assert [finding["rule"] for finding in report["findings"] if finding["severity"] == "error"] == ["T005"]
    assert "T005" in [result["ruleId"] for result in sarif("--template", file)]
    assert_refused(a3b("verify-prompt", "--template"), 2, "--template needs a model or a template")


def test_strict_warnings_and_policies() -> None:
    given = json.dumps([S, user("Hi /no_think")])
    assert a3b("verify-prompt", given=given).returncode == 0
    assert a3b("verify-prompt", "--strict-warnings", given=given).returncode == 1
    assert a3b("verify-prompt", "--profile", "qwen3", "--strict-warnings", given=given).returncode == 0
    developer = json.dumps([{"role": "developer", "content": "x"}, U])
    assert a3b("verify-prompt", given=developer).returncode == 1
    assert a3b("verify-prompt", "--map-developer", "--render", given=developer).stdout.startswith("<|im_start|>system\nx<|im_end|>")
    assert_refused(a3b("verify-prompt", "--profile", "phi3-style", given="[]"), 2, "that of Phi-3", "--profile phi-3.5")


def test_hooks_for_pre_commit_are_commands_that_work(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    hooks = yaml.safe_load((root / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    page = (root / "docs" / "verify-prompt.md").read_text(encoding="utf-8")
    files = {"a3b-verify-prompt": "prompts/a.json", "a3b-verify-prompt-data": "b.jsonl", "a3b-verify-template": "c.jinja"}
    assert {hook["id"] for hook in hooks} == set(files)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.json").write_text(json.dumps([S, U]))
    (tmp_path / "b.jsonl").write_text(json.dumps([S, U, A]))
    (tmp_path / "c.jinja").write_text(published_text("qwen3.6"), encoding="utf-8")
    for hook in hooks:
        file = files[hook["id"]]
        assert re.search(hook["files"], file)
        assert f"id: {hook['id']}" in page
        done = a3b(*hook["entry"].split()[1:], file, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        assert yaml.safe_load(block)


@pytest.mark.parametrize(
    ("where", "at", "found"),
    [
        ("messages[1].content", None, '"x\\u00e9'),
        ("messages[1].content", 2, "<|im"),
        ("messages[1].name", None, '{"role": "user"'),
        ("messages[1]['odd key']", None, "5"),
        ("messages[9]", None, '[{"role": "system"'),
        ("$", None, '{"messages"'),
        ("tools", None, "[]"),
        ("line 1, column 2", None, None),
    ],
)
def test_places_in_json(where: str, at: int | None, found: str | None) -> None:
    text = (
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "odd key": 5, "content": "x\\u00e9<|im_end|>"}], "tools": []}'
    )
    place = locate(text, where, at)
    assert (None if place is None else text[place : place + len(found or "")]) == found
    assert T["role"] == "tool"
