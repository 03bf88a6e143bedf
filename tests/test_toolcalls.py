"""Tool calls, reasoning and content out of outputs of every form, whole and in pieces with the same result."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a3b_gguf.schema_check import SchemaCheck
from a3b_gguf.template import ChatTemplate
from a3b_gguf.toolcalls import Content, OutputParser, Reasoning, ToolCall, ToolCallDelta
from a3b_gguf.toolcalls.lexer import Lexer
from a3b_gguf.toolcalls.tools import matching_key
from output_forms import FORMS, Form
from outputs import PARIS, TEXT, TOOLS, pieces, run, tool, xml
from templates import template_text


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_form(form: Form) -> None:
    for cuts in pieces(form.text):
        found = run(form.text, cuts, form.thinking, form.truncated)
        assert (found.reasoning, found.content, found.calls) == (form.reasoning, form.content, list(form.calls))
        assert set(form.rules) <= set(found.rules)
        assert form.rules or not found.rules, found.rules
        if form.truncated and "O003" in form.rules:
            assert found.raw, "what was dropped is told"


# (parameter of the tool `typed`, text, value; a missing value: the call is refused)
REFUSED = object()
VALUES: list[tuple[str, str, Any]] = [
    ("zip", "03106", "03106"),
    ("zip", "null", "null"),
    ("zip", "True", "True"),
    ("zip", '"quoted"', '"quoted"'),
    ("n", "42", 42),
    ("n", "3.0", 3),
    ("n", "-7", -7),
    ("n", "3.5", REFUSED),
    ("n", "true", REFUSED),
    ("n", "9" * 5000, REFUSED),
    ("x", "72.00000", 72.0),
    ("x", "1e400", REFUSED),
    ("x", "NaN", REFUSED),
    ("flag", "true", True),
    ("flag", "True", True),
    ("flag", "False", False),
    ("flag", "yes", REFUSED),
    ("maybe", "5", 5),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("size", "12", 12),
    ("size", "03106", "03106"),
    ("size", "large", "large"),
    ("box", '{"a": [1, true, null]}', {"a": [1, True, None]}),
    ("box", "[1]", REFUSED),
    ("box", '{"a": 1, "a": 2}', REFUSED),
    ("box", "[" * 100_000, REFUSED),
    ("list", '["a",\n "b"]', ["a", "b"]),
    ("level", '"low"', "low"),
    ("level", "high\n", "high"),
    ("level", "null", None),
    ("level", "other", REFUSED),
    ("any", "42", "42"),
    ("any", "true", "true"),
    ("any", '{"a": 1}', {"a": 1}),
    ("any", "[1]", [1]),
    ("loop", "x", "x"),
    ("either", "x", "x"),
    ("either", "5", "5"),
    ("twice", "5", 5),
    ("undeclared", "7", "7"),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES, ids=[f"{key}-{text[:12]}" for key, text, _ in VALUES])
def test_value_is_typed_by_the_schema(key: str, text: str, value: Any) -> None:
    found = run(xml("typed", (key, text)))
    if value is REFUSED:
        assert not found.calls
        assert found.rules == ["O015"]
        assert found.content == xml("typed", (key, text))
    else:
        assert found.calls == [("typed", {key: value})]
        assert type(found.calls[0][1][key]) is type(value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"n": 42, "zip": "03106"}, {"n": 42, "zip": "03106"}),
        ({"n": "42", "flag": "True", "list": "[1]"}, {"n": 42, "flag": True, "list": [1]}),
        ({"n": 3.0}, {"n": 3}),
        ({"n": True}, None),
        ({"zip": 3106}, None),
        ({"any": 7}, {"any": 7}),
    ],
)
def test_json_arguments_are_typed_too(arguments: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = run("<tool_call>\n" + json.dumps({"name": "typed", "arguments": arguments}) + "\n</tool_call>")
    assert found.calls == ([] if expected is None else [("typed", expected)])


def test_arguments_are_compact_and_keep_their_letters() -> None:
    assert run(xml("get_weather", ("city", "Zürich 東京"), ("days", "2"))).arguments == ['{"city":"Zürich 東京","days":2}']


def test_half_of_a_pair_in_json_stays_valid_text() -> None:
    found = run('<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800"}}</tool_call>')
    assert found.arguments == ['{"city":"\\ud800"}']


def test_without_tools_markup_is_text() -> None:
    assert run(PARIS, tools=None).content == PARIS
    assert run("x\n" + PARIS, thinking=True, tools=[]).reasoning == "x\n" + PARIS


def test_tools_of_another_form_are_no_tools() -> None:
    assert run(PARIS, tools=[None, {"function": 5}, {"function": {"name": 3}}, {"type": "function"}]).content == PARIS


@pytest.mark.parametrize("written", ["get_weather", "getWeather", "Get_Weather", "GET-WEATHER", "get.weather", "GetWeather", "get weather"])
def test_matching_key(written: str) -> None:
    assert matching_key(written) == "get_weather"


def test_a_name_that_two_tools_could_mean_is_unknown() -> None:
    tools = [tool("Ping"), tool("ping")]
    assert run(xml("PING"), tools=tools).rules == ["O011"]
    assert run(xml("Ping"), tools=tools).calls == [("Ping", {})]


def test_text_goes_out_as_soon_as_it_is_safe() -> None:
    parser = OutputParser(TOOLS, in_thinking=True)
    assert parser.feed("Let me ") == [Reasoning("Let me")]
    assert parser.feed("see") == [Reasoning(" see")]
    assert parser.feed("\n</thi") == []
    assert parser.feed("nk>\n\nPar") == [Content("Par")]
    assert parser.feed("is. 1 <") == [Content("is. 1 ")]
    assert parser.feed(" 2 <tool_c") == [Content("< 2 ")]
    assert parser.feed("all>\n<function=ping>") == []
    events = parser.feed("\n</function>\n</tool_call>")
    assert [type(event) for event in events] == [ToolCallDelta, ToolCall]
    assert parser.finish(truncated=False) == []


def deltas(*fed: str, truncated: bool = False) -> list[str]:
    """What of the first call's arguments is out after each piece, and at the end."""
    parser = OutputParser(TOOLS, in_thinking=False)
    out = []
    for events in [*(parser.feed(text) for text in fed), parser.finish(truncated)]:
        out.append("".join(event.arguments for event in events if isinstance(event, ToolCallDelta) and event.index == 0))
    return out


OPEN_CALL = "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n"


def test_arguments_go_out_as_soon_as_they_are_certain() -> None:
    """Nothing before all that is required is there; then the text as it comes, but for a line break that may be the template's."""
    assert deltas(
        OPEN_CALL, "<parameter=content>", "\nx =", ' "1"\n', "\n</par", "ameter>\nmore\n", "</parameter>\n", "</function>\n", "</tool_call>"
    ) == ["", '{"path":"a","content":"', "x =", ' \\"1\\"', "\\n", "\\n</parameter>\\nmore", "", "", '"}', ""]  # fmt: skip


JSON_CALL = '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": '


def test_arguments_in_json_form_go_out_too() -> None:
    """Escapes when they are whole, the end of a string when it is proved one."""
    fed = ("<tool_call>\n", JSON_CALL[12:], '"x', " =\\", 'n\\"q\\ud83d', '\\ude00 </tool_call>', '"', " }", "}\n</tool_call>")
    assert deltas(*fed) == [
        "", "", '{"path":"a","content":"x', " =", '\\n\\"q', "😀 ", "", "", '</tool_call>"}', "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<tool_call>\n{"arguments": {"path": "a", "content": "x', "the name is not known yet"),
        ('<tool_call>\n{"name": "write_file", "arguments": {"content": "x', "path is required and not there"),
        ('<tool_call>\n{"name": "write_file", "arguments": "{\\"path\\": \\"a\\", \\"content\\": \\"x', "arguments as a string"),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"days": "soon", "city": "x', "days does not fit"),
        ("<tool_call>\n{'name': 'write_file', 'arguments': {'path': 'a', 'content': 'x", "no strict JSON"),
        ("<tool_call>\n<function=write_file>\n<parameter=content>\nx\ny", "path is required and not there"),
        ("<tool_call>\n<function=typed>\n<parameter=n>\n42", "a number is known at its end"),
        ("<tool_call>\n<function=nope>\n<parameter=content>\nx\ny", "no such tool"),
        ("<tool_call>\n<function=get_weather>\n<parameter=days>\nsoon\n</parameter>\n<parameter=city>\nx\ny", "days does not fit"),
        ("<tool_call>\n<function=get_weather>\n<parameter=unit>\nkelvin\n</parameter>\n<parameter=city>\nx\ny", "unit does not fit"),
        ("<tool_call>\n<function=edit>\n<parameter=edits>\n[]\n</parameter>\n<parameter=note>\nx", "null or a string"),
    ],
)
def test_arguments_that_may_not_fit_are_held_back(text: str, why: str) -> None:
    assert "".join(deltas(text, truncated=True)) == "", why


def test_behind_a_possible_end_nothing_more_goes_out_until_the_end_is_certain() -> None:
    might_end = OPEN_CALL + "<parameter=content>\nx\n</parameter>\n</function>\n"
    assert deltas(might_end, "more\n", "and more")[:3] == ['{"path":"a","content":"x', "", ""]
    assert "".join(deltas(might_end, "more\n", "and more")) == '{"path":"a","content":"x"}'
    closed = deltas(might_end, "more\n", "</parameter>\n</function>\n</tool_call>")
    assert closed == ['{"path":"a","content":"x', "", '\\n</parameter>\\n</function>\\nmore"}', ""]


def test_a_call_that_is_cut_off_or_breaks_leaves_its_json_open() -> None:
    """Who shows deltas cannot take them back; nobody can take them for a call."""
    open_value = OPEN_CALL + "<parameter=content>\nhalf"
    for text, truncated in ((open_value, True), (open_value, False)):
        assert deltas(text, truncated=truncated)[0] == '{"path":"a","content":"half'
        found = run(text, truncated=truncated)
        assert not found.calls
        assert found.rules == ["O003" if truncated else "O002"]
    late = xml("get_weather", ("city", "x"), ("days", "soon"))
    found = run(late + PARIS)
    assert (found.calls, found.content, found.rules) == ([("get_weather", {"city": "Paris"})], late, ["O015"])


def test_a_broken_call_does_not_hold_up_the_next() -> None:
    parser = OutputParser(TOOLS, in_thinking=False)
    for broken in (
        '<tool_call>\n{"name": "ping}\n</tool_call>\n',
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</function>\n</tool_call>\n",
    ):
        assert ToolCall in [type(event) for event in parser.feed(broken + xml("ping"))]


def test_each_character_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear by construction: what the lexer is given, held text included, stays within twice the output, and tokens within its pieces."""
    read = 0
    feed = Lexer.feed

    def counted(self: Lexer, text: str) -> Any:
        nonlocal read
        read += len(text) + len(self._held)
        return feed(self, text)

    monkeypatch.setattr(Lexer, "feed", counted)
    output = "<think>" + "so it goes " * 500 + "</think>" + xml("write_file", ("path", "a"), ("content", "x </parameter> y\n" * 500))
    assert len(run(output, range(3, len(output), 3)).calls) == 1
    assert read < 2 * len(output)


MARKUP = [
    "<tool_call>", "</tool_call>", "<function=get_weather>", "<function=ping>", "<function=nope>", "</function>", "<parameter=city>",
    "<parameter=days>", "<parameter=x>", "<parameter=unit>", "celsius", "<function=edit>", "<parameter=edits>", "[1,]", "<parameter=note>",
    xml("write_file", ("path", "a"), ("content", "b")), "<function=write_file>", "<parameter=path>", "<parameter=content>",
    "<parameter=", "</parameter>", "<think>", "</think>", "</function_invocation>", "\n", "\n\n", " ",
    "```\n", "`", "Paris", "3",
    '{"name": "get_weather", "arguments": {"city": "Paris"', "'", "“", "//", ",", "True", ":",
    '{"name": "ping"', '"arguments": {}}', "{", "}", '"', "\\", "<", ">", "<tool_", "=", "\r\n", "ü",
]  # fmt: skip
OUTPUTS = st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=30).map("".join)


CHECKS = {tool["function"]["name"]: SchemaCheck(tool["function"]["parameters"]) for tool in TOOLS}


def test_any_output_in_any_pieces() -> None:
    fuzz(300)


@pytest.mark.prove
def test_fifty_thousand_outputs() -> None:
    fuzz(50_000)


def fuzz(count: int) -> None:
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(
        given(text=OUTPUTS, thinking=st.booleans(), truncated=st.booleans(), data=st.data())(check_output)
    )()


def check_output(text: str, thinking: bool, truncated: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole = run(text, (), thinking, truncated)
    for others in (cuts, range(1, len(text))):
        found = run(text, others, thinking, truncated)
        assert (found.reasoning, found.content, found.calls, found.raw) == (whole.reasoning, whole.content, whole.calls, whole.raw)
    for name, arguments in whole.calls:
        assert CHECKS[name].problem(arguments) is None


VALUE_PIECES = st.lists(
    st.sampled_from(
        ["</parameter>", "</function>", "</tool_call>", "<tool_call>", "\n", "a", " ", "<parameter=path>", "<parameter=z>", "&<>"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(value=VALUE_PIECES)
def test_a_value_with_tags_in_it_is_one_call(value: str) -> None:
    """Whatever tags a text holds, as long as it does not spell the end of a call behind the end of a value."""
    joined = re.sub(r"\s+", "", value + "</parameter></function></tool_call>")
    ambiguous = re.search(r"</parameter>(</parameter>|</function>(</tool_call>|<tool_call>).|</tool_call>|<parameter=)", joined)
    if ambiguous or re.search(r"</function>\s*(</tool_call>\s*)?<tool_call>", value):
        return
    found = run(xml("write_file", ("path", "p"), ("content", value)))
    assert found.calls == [("write_file", {"path": "p", "content": value})]


@pytest.mark.parametrize("name", ["qwen3.6", "qwen3.5", "qwen3-coder", "qwen3", "qwen2.5", "tiny-a3b"])
def test_what_a_template_writes_is_what_is_read(name: str) -> None:
    """The two calls of an assistant's turn, rendered by the model's own template, come back as they were."""
    tools = [tool("save", path=TEXT, content=TEXT, n={"type": "integer"}, ok={"type": "boolean"}, rows={"type": "array"})]
    given = {"path": "a", "content": 'x\n  </parameter> "q" 東\n', "n": 3, "ok": True, "rows": [1, {"a": None}]}
    call = {"id": "c", "type": "function", "function": {"name": "save", "arguments": given}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    prompt = ChatTemplate(template_text(name)).render(messages, tools, add_generation_prompt=False)
    output = prompt.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    found = run(output, tools=tools)
    assert found.calls == [("save", given), ("save", given)]
    assert not found.content.strip()
