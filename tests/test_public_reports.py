"""Bug reports of other servers about tool calls, in our own words: what each of them showed must come out right here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.grammar import answer_grammar, call_grammar
from a3b_gguf.llama.grammar import check_grammar
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.sampling import Grammar
from a3b_gguf.llama.vocab import Vocab
from output_forms import FORMS
from outputs import INNER, PARIS, TEXT, WEATHER, pieces, run, tool, xml

GITHUB = "https://github.com/"
# Reports whose case is among the forms of output_forms.py, by the beginning of the forms' names.
AMONG_THE_FORMS = {
    "QwenLM/Qwen3-Coder/issues/475": "P03", "ollama/ollama/issues/16686": "P03", "ggml-org/llama.cpp/issues/20260": "P02",
    "ggml-org/llama.cpp/issues/21118": "P23", "vllm-project/vllm/issues/39056": "P23", "sgl-project/sglang/pull/22837": "P23",
    "sgl-project/sglang/pull/38624": "P36", "ggml-org/llama.cpp/issues/24807": "P08", "ggml-org/llama.cpp/issues/24351": "P40",
    "vllm-project/vllm/issues/55495": "P10", "vllm-project/vllm/pull/34919": "P11", "raullenchai/Rapid-MLX/issues/1515": "P12",
    "sgl-project/sglang/issues/39836": "P13", "ollama/ollama/issues/12357": "P46", "ollama/ollama/issues/16383": "P33",
    "QwenLM/Qwen3.8/issues/178": "P33", "ollama/ollama/issues/14570": "P41", "cline/cline/issues/13001": "P41",
    "vllm-project/vllm/issues/17790": "P34", "Graphify-Labs/graphify/issues/2286": "P32", "mangiucugna/json_repair/issues/88": "P32",
    "omnirexflora-labs/omnicoreagent/issues/48": "P35", "abetlen/llama-cpp-python/issues/1784": "P31",
}  # fmt: skip


@pytest.mark.parametrize(("report", "form"), AMONG_THE_FORMS.items(), ids=list(AMONG_THE_FORMS))
def test_a_report_among_the_forms(report: str, form: str) -> None:
    assert any(each.name.startswith(f"{form} ") for each in FORMS)


CREATE = tool("create_issue", ["title"], title=TEXT, state={"anyOf": [{"type": "string", "enum": ["open", "closed"]}, {"type": "null"}]})
EDIT = tool("edit", ["path", "edits"], path=TEXT, edits={"type": "array", "items": {"type": "object"}})
SEARCH = tool("GrepSearch", ["Pattern"], Pattern=TEXT)
CODE = 'def f(x):\n    return {"a": x, \'b\': "</parameter>"}  # “ok”：\n'
# (report, tools, output, calls)
REPORTS: list[tuple[str, list[Any], str, list[tuple[str, Any]]]] = [
    ("ggml-org/llama.cpp/issues/22240: an enum by anyOf comes back in quotes", [CREATE],
     xml("create_issue", ("title", "t"), ("state", '"open"')), [("create_issue", {"title": "t", "state": "open"})]),
    ("sgl-project/sglang/pull/13411: a zip code loses its zero", [tool("find", ["zip"], zip=TEXT)],
     xml("find", ("zip", "03106")), [("find", {"zip": "03106"})]),
    ("sgl-project/sglang/issues/39836: a parameter twice", [EDIT],
     xml("edit", ("path", "a"), ("edits", '[{"n": 1}]'), ("edits", '[{"n": 2}]')), [("edit", {"path": "a", "edits": [{"n": 1}]})]),
    ("mangiucugna/json_repair/issues/200: code is cut into keys", [tool("run", ["code"], code=TEXT)],
     xml("run", ("code", CODE)), [("run", {"code": CODE})]),
    ("mangiucugna/json_repair/issues/200: the same as JSON", [tool("run", ["code"], code=TEXT)],
     f'<tool_call>\n{json.dumps({"name": "run", "arguments": {"code": CODE}})}\n</tool_call>', [("run", {"code": CODE})]),
    ("omnirexflora-labs/omnicoreagent/issues/48: names in lower case", [SEARCH],
     xml("grepsearch", ("Pattern", "x")) + xml("grep_search", ("Pattern", "x")), [("GrepSearch", {"Pattern": "x"})]),
    ("ggml-org/llama.cpp/issues/27363: optional before required", [tool("f", ["b"], a=TEXT, b=TEXT)],
     xml("f", ("a", "1"), ("b", "2")), [("f", {"a": "1", "b": "2"})]),
    ("ggml-org/llama.cpp/issues/24863: a closer twice, in every place", [EDIT],
     xml("edit", ("path", "a\n</parameter>"), ("edits", "[]\n</parameter>")), [("edit", {"path": "a", "edits": []})]),
    ("vllm-project/vllm/issues/10395: a value that is no JSON while it is open", [EDIT],
     xml("edit", ("path", 'a"b\\'), ("edits", '[{"x": "1"}]')), [("edit", {"path": 'a"b\\', "edits": [{"x": "1"}]})]),
]  # fmt: skip


@pytest.mark.parametrize(("report", "tools", "output", "calls"), REPORTS, ids=[report for report, *_ in REPORTS])
def test_a_report(report: str, tools: list[Any], output: str, calls: list[tuple[str, Any]]) -> None:
    for cuts in pieces(output):
        found = run(output, cuts, tools=tools)
        assert found.calls[-1:] == calls


def test_finish_reasons_follow_from_calls_not_from_markup() -> None:
    """vllm-project/vllm/issues/47963: markup that was cut off is no call."""
    assert not run("<tool_call>\n" + INNER[:-1], truncated=True, tools=[tool("get_weather", ["city"], city=TEXT)]).calls
    assert run(PARIS).calls == [WEATHER]


def test_grammars_that_ended_other_servers(tiny_bf16: Path) -> None:
    """ggml-org/llama.cpp/issues/19430 (a token that begins with `=` crosses a border), 27619 (a description ends in an empty grammar),
    agentscope-ai/QwenPaw/issues/3560 (bounds that are too large)."""
    described = tool("list_files", ["path"], path={"type": "string", "description": 'of "all" files <parameter=path> \\ [a-z] ::= root\n'})
    large = tool("add", ["rows"], rows={"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 50_000})
    with load_model(tiny_bf16, LoadParams(n_ctx=256), vocab_only=True) as model:
        vocab = Vocab(model)
        for each in (described, large):
            for style in ("xml", "json"):
                constraint = call_grammar([each["function"]], style, in_thinking=True, parallel=True)
                assert check_grammar(vocab, Grammar(constraint.text)) is None
                assert bool(constraint.loosened) is (each is large)
        assert check_grammar(vocab, Grammar(answer_grammar({"type": "string", "maxLength": 100_000}, False).text)) is None
