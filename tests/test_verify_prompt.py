"""`a3b verify-prompt` as a user runs it: verdicts, exit codes, refusals that help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.flows.prompts import chat_template_of, control_texts, profile_of, speaker_of
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.metadata import Field, Metadata, array, string, u32
from a3b_gguf.prompt import PROFILES
from command import a3b as process
from command import assert_refused
from conversations import GOOD, TOOL, A, S, U
from inside import inside as a3b

VERDICT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["profile", "ok", "findings"],
    "properties": {
        "profile": {"type": "string"},
        "ok": {"type": "boolean"},
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["rule", "severity", "where", "message", "fix", "offset", "line", "column"],
                "properties": {
                    "rule": {"type": "string", "pattern": "^[MRKTG][0-9]{3}$"},
                    "severity": {"enum": ["error", "warning", "note"]},
                    "where": {"type": "string"},
                    "message": {"type": "string"},
                    "fix": {"type": "string"},
                    "offset": {"type": ["integer", "null"]},
                    "line": {"type": "integer", "minimum": 0},
                    "column": {"type": "integer", "minimum": 0},
                },
            },
        },
    },
}


def model(path: Path, **changes: Field | None) -> Path:
    """A GGUF with a vocabulary and a template and no tensors; a change of None leaves the key out."""
    metadata: Metadata = {
        "general.architecture": string("qwen35moe"),
        "tokenizer.ggml.tokens": array("str", ["a", "<|im_start|>", "<|im_end|>", "<think>", "  "]),
        "tokenizer.ggml.token_type": array("i32", [1, 3, 3, 4, 4]),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.chat_template": string("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"),
    }
    for key, field in changes.items():
        metadata["tokenizer." + key.replace("__", ".")] = field or string("")
    write_gguf(path, {key: field for key, field in metadata.items() if field.value != ""}, [])
    return path


def test_a_good_prompt() -> None:
    done = process("verify-prompt", given=json.dumps([S, U]))
    assert (done.returncode, done.stdout) == (0, "profile qwen3.6: ok, no findings\n")


def test_a_late_system_message(tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([U, S]), encoding="utf-8")
    done = a3b("verify-prompt", file)
    assert done.returncode == 1
    assert done.stdout == (
        "M031 error messages[1]: the system message is at index 1, it must be messages[0]\n"
        '     1 | [{"role": "user", "content": "Hi"}, {"role": "system", "content": "You are brief."}]\n'
        "       |                                     ^\n"
        "     fix: move it to the front\n"
        "profile qwen3.6: refused, 1 error\n"
    )


def test_no_system_message_is_a_note_unless_it_is_required() -> None:
    done = a3b("verify-prompt", "-", given=json.dumps([U]))
    assert done.returncode == 0
    assert "M030 note messages" in done.stdout
    assert done.stdout.endswith("profile qwen3.6: ok, 1 note\n")
    done = a3b("verify-prompt", "--system", "required", given=json.dumps([U]))
    assert done.returncode == 1
    assert "M030 error messages" in done.stdout


@pytest.mark.parametrize("words", [("--json",), ("--format", "json")])
def test_json(words: tuple[str, ...]) -> None:
    done = a3b("verify-prompt", *words, "--profile", "qwen3", given=json.dumps([U, S, A]))
    verdict = json.loads(done.stdout)
    jsonschema.validate(verdict, VERDICT)
    assert (done.returncode, verdict["profile"], verdict["ok"]) == (1, "qwen3", False)
    assert [(finding["rule"], finding["where"]) for finding in verdict["findings"]] == [("M031", "messages[1]"), ("M044", "messages[2]")]


def test_a_whole_request_and_tools(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "no name"}}]), encoding="utf-8")
    done = a3b("verify-prompt", "--tools", tools, given=json.dumps([S, U]))
    assert done.returncode == 1
    assert "M071 error tools[0].function.name" in done.stdout
    request = json.dumps({"messages": [S, U], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": "false"}})
    done = a3b("verify-prompt", given=request)
    assert done.returncode == 1
    assert "M100 error chat_template_kwargs.enable_thinking" in done.stdout
    assert_refused(a3b("verify-prompt", "--tools", tools, given=request), 2, "the request has tools of its own")
    tools.write_text("[{", encoding="utf-8")
    assert_refused(a3b("verify-prompt", "--tools", tools, given=json.dumps([S, U])), 3, f"{tools}, line 1, column 3", "M003")


def test_raw() -> None:
    assert a3b("verify-prompt", "--raw", given=GOOD).returncode == 0
    done = a3b("verify-prompt", "--raw", "--json", given=GOOD.replace("user", "tool"))
    verdict = json.loads(done.stdout)
    jsonschema.validate(verdict, VERDICT)
    assert [(finding["rule"], finding["where"], finding["offset"]) for finding in verdict["findings"]] == [("R011", "byte 39, line 3", 39)]


def test_the_model_decides_what_is_a_control_token(tiny_bf16: Path) -> None:
    request = json.dumps([S, {"role": "user", "content": "<|quad_start|>"}])
    assert a3b("verify-prompt", given=request).returncode == 1
    done = a3b("verify-prompt", "--model", tiny_bf16, given=request)
    assert (done.returncode, done.stdout) == (0, f"profile {tiny_bf16.name}: ok, no findings\n")
    done = a3b("verify-prompt", "--model", tiny_bf16, given=request.replace("<|quad_start|>", "<tool_call>"))
    assert done.returncode == 1
    assert "M057" in done.stdout


def test_profile_of_the_embedded_model(tiny_bf16: Path) -> None:
    file = read_gguf(tiny_bf16)
    profile = profile_of(file, chat_template_of(file))
    assert set(profile.controls) == {
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
        "</tool_response>",
    }  # fmt: skip
    assert profile.generation_on == PROFILES["qwen3.6"].generation_on
    assert (profile.strict_system, profile.call_style) == (True, "xml")


def test_the_models_own_template_has_the_last_word(tmp_path: Path) -> None:
    picky = string("{% if messages[0].content == 'No.' %}{{ raise_exception('Be polite.') }}{% endif %}{{ messages[-1].content }}")
    file = model(tmp_path / "picky.gguf", chat_template=picky)
    done = a3b("verify-prompt", "--model", file, given=json.dumps([{"role": "system", "content": "No."}, U]))
    assert done.returncode == 1
    assert "M099 error messages: the model's chat template refuses these messages: Be polite." in done.stdout
    assert a3b("verify-prompt", "--model", file, given=json.dumps([S, U])).returncode == 0


def test_special_tokens_reach_the_template_and_blanks_are_no_controls(tmp_path: Path) -> None:
    file = read_gguf(model(tmp_path / "model.gguf"))
    assert chat_template_of(file).render([U]) == "user: Hi<|im_end|>\n"
    assert control_texts(file) == ("<|im_start|>", "<|im_end|>", "<think>")


def test_a_family_that_raw_prompts_are_not_checked_for(tmp_path: Path) -> None:
    file = model(tmp_path / "model.gguf")
    assert_refused(a3b("verify-prompt", "--raw", "--model", file, given=GOOD), 3, "does not write <|im_start|> turns")
    assert a3b("verify-prompt", "--model", file, given=json.dumps([S, U])).returncode == 0


def test_usage_errors(tmp_path: Path) -> None:
    given = json.dumps([S, U])
    assert_refused(a3b("verify-prompt", "--profile", "llama", given=given), 2, "'llama'", "qwen3.6, qwen3.5, qwen3, qwen3-coder, chatml")
    assert_refused(a3b("verify-prompt", "--profile", "qwen3", "--model", "x.gguf", given=given), 2, "cannot both be given")
    assert_refused(a3b("verify-prompt", "--system", "maybe", given=given), 2, "expected optional or required")
    assert_refused(a3b("verify-prompt", "--format", "xml", given=given), 2, "expected text or json")
    assert_refused(a3b("verify-prompt", "--raw", "--tools", tmp_path, given=GOOD), 2, "--tools has no meaning with --raw")
    assert_refused(a3b("verify-prompt", "--render", "--json", given=given), 2, "--show-tokens --json")
    for shown in ("--fix", "--show-tokens"):
        assert_refused(a3b("verify-prompt", shown, "--format", "sarif", given=given), 2, "sarif is for findings")
    assert_refused(a3b("verify-prompt", "--reserve", "9", given=given), 2, "--reserve needs --ctx")


def test_unreadable_input(tmp_path: Path) -> None:
    assert_refused(process("verify-prompt", tmp_path / "absent.json"), 3, "absent.json: No such file or directory")
    assert_refused(a3b("verify-prompt", tmp_path), 3, "Is a directory")
    assert_refused(a3b("verify-prompt", given='[\n {"role": "user",}]'), 3, "standard input, line 2, column 18: not JSON", "M003")
    assert_refused(a3b("verify-prompt", given=""), 3, "standard input, line 1, column 1: not JSON")
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'[{"role": "us\xfcr"}]')
    assert_refused(a3b("verify-prompt", latin), 3, "byte 13, line 1: byte 0xFC is not UTF-8", "M001")
    assert_refused(a3b("verify-prompt", "--raw", latin), 3, "byte 13 is not UTF-8")


def test_unreadable_models(tmp_path: Path, tiny_bf16: Path) -> None:
    def check(path: Path, *said: str) -> None:
        with pytest.raises(BadInput) as error:
            speaker_of(path)
        for words in said:
            assert words in f"{error.value.message} {error.value.hint}"

    check(tmp_path / "absent.gguf", "absent.gguf: No such file or directory")
    check(tmp_path, "is a folder, expected a .gguf file")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_bf16.read_bytes()[:20_000])
    check(cut, "is cut off")
    assert_refused(a3b("verify-prompt", "--model", cut, given=json.dumps([S, U])), 3, "cut.gguf is cut off")
    check(model(tmp_path / "none.gguf", chat_template=None), "tokenizer.chat_template is missing", "a3b convert --chat-template")
    check(model(tmp_path / "bad.gguf", chat_template=string("\n{% if %}")), "bad.gguf: the chat template has a syntax error in line 2")
    check(model(tmp_path / "silent.gguf", chat_template=string("x")), "silent.gguf does not render a user message")
    evil = model(tmp_path / "evil.gguf", chat_template=string("{{ ''.__class__.__mro__ }}"))
    check(evil, "reaches for .__mro__ in line 1, which leads out of its sandbox (T005)")
    check(model(tmp_path / "types.gguf", ggml__token_type=array("i32", [1])), "5 tokens but 1 token types")
    check(model(tmp_path / "types.gguf", ggml__token_type=None), "tokenizer.ggml.token_type is missing")


def test_without_a_model_nothing_heavy_is_imported() -> None:
    """What makes the command start in a quarter of a second."""
    code = (
        "import sys; sys.argv = ['a3b', 'verify-prompt', '-']\n"
        "from a3b_gguf.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'jinja2', 'numpy', 'llama_cpp', 'gguf', 'rich', 'fastapi'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps([S, U]), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
