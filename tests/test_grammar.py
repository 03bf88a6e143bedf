"""Grammars of schemas and of calls: llama.cpp reads them, they take what fits, and nothing that follows them fails to fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from a3b_gguf.grammar import Constraint, NotExpressible, answer_grammar, call_grammar, json_object_grammar
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.schema_check import SchemaCheck
from a3b_gguf.strict_json import loads
from a3b_gguf.toolcalls import OutputParser, ToolCall
from grammar_texts import Texts
from outputs import TOOLS, run, tool, xml

LLAMA_CPPS = json.loads((Path(__file__).parent / "golden" / "grammar_schemas.json").read_text())


@pytest.fixture(scope="module")
def texts(tiny_bf16: Path) -> Iterator[Texts]:
    with load_model(tiny_bf16, LoadParams(n_ctx=256), vocab_only=True) as model:
        yield Texts(Vocab(model))


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
# (schema, values as JSON that follow its grammar, others that do not)
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({}, ["1", '"a"', "null", "[1, {}]", '{"a": [true]}', "-1.5e3"], ["01", "'a'", "{,}", "[1,]", "nul"]),
    ({"type": "object"}, ["{}", '{"a": 1}'], ["[]", "1"]),
    (obj("a", a=INTEGER, b=STRING),
     ['{"a": 1}', '{"a":1,"b":"x"}', '{\n  "a": 1\n}'], ['{"b": "x"}', '{"a": "1"}', '{"a": 1, "c": 2}', "{}"]),
    (obj(a=INTEGER, b=INTEGER, c=INTEGER), ["{}", '{"b": 1}', '{"a": 1, "c": 3}'], ['{"c": 1, "a": 2}', '{"a": 1,}', '{, "a": 1}']),
    ({"type": "object", "additionalProperties": INTEGER}, ["{}", '{"x": 1, "y": 2}'], ['{"x": "1"}']),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"x": 1}']),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3}, ["[1]", "[1, 2, 3]"], ["[]", "[1,2,3,4]", '["1"]']),
    ({"type": "array", "prefixItems": [INTEGER, STRING]}, ['[1, "a"]'], ["[1]", '["a", 1]']),
    ({"enum": ["red", 1, None, {"a": 1}]}, ['"red"', "1", "null", '{"a":1}'], ['"blue"', "red", "2"]),
    ({"type": "string", "enum": ["red", 1]}, ['"red"'], ["1"]),
    ({"const": 'say "hi"\n'}, ['"say \\"hi\\"\\n"'], ['"say"']),
    ({"type": ["integer", "null"]}, ["1", "null"], ['"1"', "1.5"]),
    ({"type": "integer", "nullable": True}, ["1", "null"], ["x"]),
    ({"anyOf": [STRING, INTEGER], "description": "either"}, ['"a"', "1"], ["null"]),
    ({"type": "integer", "minimum": -12, "maximum": 345}, ["-12", "0", "9", "99", "345", "-1"], ["-13", "346", "007", "1000", "-0"]),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8}, ["6", "7"], ["5", "8"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "1", "0.25"], ["1.1", "-0.1", "2", "1e0"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 2}, ["0.1", "1", "2", "1.99"], ["0", "0.0", "2.1"]),
    ({"type": "number", "minimum": 0.1, "maximum": 0.9}, ["0.1", "0.9", "0.5"], ["0.0", "1", "0.95"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"東京"', '"a\\n"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^[a-c]+\\d{2}$"}, ['"ab12"'], ['"ab1"', '"d12"', '"xab12"']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
    ({"type": "string", "pattern": '^(a|"|\\\\)?[^x]\\.$'}, ['"a1."', '"\\"1."', '"\\\\1."'], ['"ax."', '"a12"']),
    ({"type": "string", "pattern": "^a$|^bc?$"}, ['"a"', '"b"', '"bc"'], ['"ab"', '"c"']),
    ({"type": "string", "format": "date"}, ['"2026-12-31"', '"2024-02-29"'], ['"2026-13-01"', '"2026-04-31"', '"x"']),
    ({"type": "string", "format": "date-time"}, ['"2026-12-31T23:59:59Z"', '"2026-12-31T23:59:59.123+01:00"'], ['"2026-12-31"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, ["1"], ['"1"']),
    ({"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"type": "integer", "minimum": 3}}}, ["3", "5"], ["2", "6"]),
    (
        {"$ref": "#/$defs/t", "$defs": {"t": obj("v", v=INTEGER, kids={"type": "array", "items": {"$ref": "#/$defs/t"}})}},
        ['{"v": 1}', '{"v": 1, "kids": [{"v": 2, "kids": []}]}'],
        ['{"v": 1, "kids": [2]}'],
    ),
    ({"allOf": [obj("a", a=INTEGER), obj("b", b=STRING)]}, ['{"a": 1, "b": "x"}'], ['{"a": 1}']),
    ({**obj("a", a=INTEGER), "anyOf": [obj("b", b=STRING), obj("c", c=STRING)]}, ['{"a": 1, "b": ""}', '{"a": 1, "c": ""}'], ['{"a": 1}']),
    ({"properties": {"a": INTEGER}}, ["{}", '{"a": 1}'], ['{"a": "x"}']),
    ({"minLength": 1}, ['"a"'], ['""', "1"]),
    (obj("a", 'we"ird\n', a=INTEGER, **{'we"ird\n': INTEGER}), ['{"a": 1, "we\\"ird\\n": 2}'], ['{"a": 1}']),
    (obj("x"), ['{"x": [1]}'], ["{}"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "follow", "others"), CASES, ids=[json.dumps(schema)[:60] for schema, _, _ in CASES])
def test_what_follows_a_schema(texts: Texts, schema: Any, follow: list[str], others: list[str]) -> None:
    grammar = answer_grammar(schema, in_thinking=False)
    assert not grammar.loosened
    check = SchemaCheck(schema)
    for text in follow:
        assert texts.follows(grammar.text, text), text
        assert check.problem(loads(text)) is None
    for text in others:
        assert not texts.follows(grammar.text, text), text
    assert_drawn_fits(texts, grammar, schema, 4)


def assert_drawn_fits(texts: Texts, grammar: Constraint, schema: Any, count: int) -> int:
    """Random texts of the grammar are values of the schema; how many came to their end."""
    check = SchemaCheck(schema)
    found = [text for seed in range(count) if (text := texts.drawn(grammar.text, seed)) is not None]
    for text in found:
        assert check.problem(json.loads(text)) is None, text
    return len(found)


@pytest.mark.parametrize("case", LLAMA_CPPS, ids=[case["name"] for case in LLAMA_CPPS])
def test_what_llama_cpp_accepts_is_accepted(texts: Texts, case: dict[str, Any]) -> None:
    """Its own test schemas. Where it fails, ours refuses or says more."""
    try:
        grammar = answer_grammar(case["schema"], in_thinking=False)
    except NotExpressible:
        assert not case["accepted"]
        return
    assert_drawn_fits(texts, grammar, case["schema"] if not grammar.loosened else True, 2)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (obj(a={"type": "integer", "multipleOf": 5}), "answer.a: multipleOf"),
        ({"type": "array", "uniqueItems": True}, "answer: uniqueItems"),
        ({"type": "string", "pattern": "^(?=a)b"}, "a group of a special kind"),
        ({"type": "string", "pattern": "^(a)\\1$"}, "\\1"),
        ({"type": "string", "maxLength": 50_000}, "at most 50000 characters: llama.cpp counts to 2000"),
        ({"oneOf": [obj("a", a=INTEGER), obj("b", b=INTEGER)]}, "answer: oneOf"),
        ({"type": "number", "minimum": 2.25, "maximum": 2.75}, "answer: numbers between"),
        ({"type": "object", "properties": {"a": INTEGER}, "if": {}, "then": {}}, "answer: if"),
    ],
)
def test_what_a_grammar_does_not_say_is_named(texts: Texts, schema: Any, words: str) -> None:
    grammar = answer_grammar(schema, in_thinking=False)
    assert any(words in said for said in grammar.loosened), grammar.loosened
    texts.drawn(grammar.text, 1)  # and llama.cpp can read the rest


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "no value fits"),
        ({"type": "strng"}, "'strng'"),
        ({"$ref": "https://example.org/s.json"}, "outside of the schema"),
        ({"$ref": "#/$defs/gone"}, "points at nothing"),
        ({"$ref": "#"}, "comes back to itself"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "comes back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "round in circles"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer"),
        ({"allOf": [STRING, INTEGER]}, "no value is of type"),
        ({"type": "string", "enum": [1]}, "no value of the enum"),
        ({**obj("b", a=INTEGER), "additionalProperties": False}, "required and not allowed"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "at least"),
        ("text", "no schema"),
    ],
)
def test_schemas_without_a_grammar_say_why(schema: Any, words: str) -> None:
    with pytest.raises(NotExpressible) as refused:
        answer_grammar(schema, in_thinking=False)
    assert words in str(refused.value)


def test_reasoning_comes_first_when_the_prompt_left_it_open(texts: Texts) -> None:
    grammar = json_object_grammar(in_thinking=True).text
    for reasoning in ("Hm.\n", "a < b, </thin or <think> {}\n", ""):
        assert texts.follows(grammar, f"{reasoning}</think>\n\n{{}}")
        assert not texts.follows(grammar, f"{reasoning}{{}}")
    assert not texts.follows(grammar, "a</think>\n\nno JSON")


FUNCTIONS = [each["function"] for each in TOOLS]
BOUNDED = tool(
    "bounded",
    ["code", "title", "when", "tags", "level", "maybe", "ref"],
    code={"type": "string", "pattern": "^[A-Z]{3}-\\d+$"},
    title={"type": "string", "minLength": 2, "maxLength": 6},
    when={"type": "string", "format": "date"},
    tags={"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
    level={"enum": ["low", "high", 3]},
    maybe={"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    ref={"$ref": "#/$defs/point"},
    extra={"allOf": [{"type": "number"}, {"minimum": 0, "maximum": 1}]},
)
BOUNDED["function"]["parameters"]["$defs"] = {"point": obj("x", x={"type": "integer", "maximum": 9})}


@pytest.mark.parametrize("style", ["xml", "json"])
@pytest.mark.parametrize("in_thinking", [False, True])
def test_calls_that_follow_the_grammar_are_calls(texts: Texts, style: Any, in_thinking: bool) -> None:
    check_calls(texts, style, in_thinking, 8)


@pytest.mark.prove
@pytest.mark.parametrize("style", ["xml", "json"])
@pytest.mark.parametrize("in_thinking", [False, True])
def test_thousand_texts_of_calls(texts: Texts, style: Any, in_thinking: bool) -> None:
    check_calls(texts, style, in_thinking, 1000)


def check_calls(texts: Texts, style: Any, in_thinking: bool, count: int) -> None:
    """Random texts of the grammar: the parser finds nothing but valid calls in them."""
    tools = [*TOOLS, BOUNDED]
    grammar = call_grammar([each["function"] for each in tools], style, in_thinking, parallel=True)
    n_whole = 0
    for seed in range(count):
        text = texts.drawn(grammar.text, seed)
        if text is None:
            continue
        n_whole += 1
        found = run(text, thinking=in_thinking, tools=tools)
        assert found.calls, text
        assert not found.content.strip(), text
        assert not set(found.rules) - {"O004", "O018"}, (found.rules, text)
        assert len(found.calls) == text.count("<tool_call>") - found.reasoning.count("<tool_call>")
    assert n_whole > count // 10


@pytest.mark.parametrize("style", ["xml", "json"])
def test_each_function_alone(texts: Texts, style: Any) -> None:
    for each in [*TOOLS, BOUNDED]:
        grammar = call_grammar([each["function"]], style, in_thinking=False, parallel=False)
        for seed in range(2):
            text = texts.drawn(grammar.text, seed)
            if text is not None:
                (call,) = run(text, tools=[*TOOLS, BOUNDED]).calls
                assert call[0] == each["function"]["name"]


def test_what_models_write_follows(texts: Texts) -> None:
    grammar = call_grammar(FUNCTIONS, "xml", in_thinking=False, parallel=True).text
    for text in (
        xml("get_weather", ("city", "Paris")),
        xml("write_file", ("path", "a b"), ("content", "if a < b:\n\n    <div>&</div>\n")),
        xml("ping") + "\n" + xml("ping"),
        xml("typed", ("zip", "03106"), ("n", "42"), ("flag", "true"), ("box", '{"a": [1]}'), ("level", "null")),
    ):
        assert texts.follows(grammar, text), text
    for text in (
        "Hello",
        xml("launch"),
        xml("get_weather", ("days", "2")),
        xml("get_weather", ("city", "Paris"), ("unit", "kelvin")),
        xml("get_weather", ("city", "Paris"), ("days", "two")),
        xml("write_file", ("path", "a"), ("content", "x\n</function>\ny")),
    ):
        assert not texts.follows(grammar, text), text
    json_style = call_grammar(FUNCTIONS, "json", in_thinking=False, parallel=False).text
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a < b"}}\n</tool_call>'
    assert texts.follows(json_style, one)
    assert not texts.follows(json_style, one + "\n" + one)
    assert not texts.follows(json_style, one.replace("a < b", "<tool_call>"))


def test_functions_without_a_grammar_say_why() -> None:
    unwritable: dict[str, Any] = {"a<b": STRING}
    for function, words in (
        (tool("f", ["a"], a=False)["function"], "no"),
        (tool("f", ["a<b"], **unwritable)["function"], "cannot stand"),
        (tool("f<", [])["function"], "cannot stand"),
        (tool("f", ["a"], a={"$ref": "x.json"})["function"], "outside"),
    ):
        with pytest.raises(NotExpressible, match=words):
            call_grammar([function], "xml", False, False)
    with pytest.raises(NotExpressible):
        call_grammar([], "json", False, False)


def test_the_parser_reads_streams_of_such_calls_too(texts: Texts) -> None:
    grammar = call_grammar(FUNCTIONS, "xml", in_thinking=True, parallel=True)
    text = next(text for seed in range(99) if (text := texts.drawn(grammar.text, seed)) and text.count("<function=") > 1)
    parser = OutputParser(TOOLS, in_thinking=True)
    events = [event for character in text for event in parser.feed(character)] + parser.finish(truncated=False)
    assert sum(isinstance(event, ToolCall) for event in events) == len(run(text, thinking=True).calls)
