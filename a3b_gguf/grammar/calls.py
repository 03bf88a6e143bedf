"""The grammar of an answer that calls tools: Qwen's XML form or Hermes' JSON form, with arguments that fit.

Text between tags cannot be escaped, so where a model is held to a grammar, its text arguments do not hold the tags of the form itself:
what the parser (a3b_gguf.toolcalls) reads is then always what the grammar meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from a3b_gguf.grammar.answer import ROOT, Constraint, reasoning
from a3b_gguf.grammar.free_text import text_until
from a3b_gguf.grammar.gbnf import TEXT, NotExpressible, Rules, either, literal, one_of, repeat, without
from a3b_gguf.grammar.json_schema import FORMATS, JSONRules
from a3b_gguf.grammar.keywords import ANNOTATIONS, count_in, not_said, types_of
from a3b_gguf.grammar.merge import MOST_NESTED, merged
from a3b_gguf.grammar.pattern import pattern_rule
from a3b_gguf.strict_json import dumps

Style = Literal["xml", "json"]
XML_TAGS = ("</parameter>", "<parameter=", "</function>", "<function=", "<tool_call>", "</tool_call>", "<think>", "</think>")
JSON_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
END_OF_VALUE = "\n</parameter>\n"
END = literal(END_OF_VALUE)
NO_ANSWER = object()  # None is a schema: clients send null for "anything"
NAME = re.compile(r"[^<>=\s]{1,128}")


def call_grammar(
    functions: Sequence[Mapping[str, Any]], style: Style, in_thinking: bool, parallel: bool, answer: Any = NO_ANSWER
) -> Constraint:
    """One call of one of the functions, or several of them. functions: {"name", "parameters"} each, as in OpenAI's `tools`.

    in_thinking: the reasoning comes first, up to its `</think>`. answer: a schema; the answer may be JSON of it instead of calls, and its
    texts then hold no tags either. Raises NotExpressible when there is a function, or an answer, that cannot be said.
    """
    rules = Rules()
    rules.set(ROOT, "")
    loosened: list[str] = []
    one = _XML if style == "xml" else _JSON
    calls = [one(rules, function, loosened).rule() for function in functions]
    if not calls:
        raise NotExpressible("there is no function to call")
    call = rules.add("call", f'"<tool_call>\n" {either(calls)} "\n</tool_call>"')
    whole = f'{call} ("\n" {call})*' if parallel else call
    if answer is not NO_ANSWER:
        values = JSONRules(rules, answer, XML_TAGS if style == "xml" else JSON_TAGS)
        whole = f"({whole} | {values.value(answer, 'answer')})"
        loosened += values.loosened
    rules.set(ROOT, f"{reasoning(rules, in_thinking)}{whole}")
    return Constraint(rules.text(), tuple(loosened))


class _JSON:
    """`{"name": ..., "arguments": {...}}`."""

    def __init__(self, rules: Rules, function: Mapping[str, Any], loosened: list[str]) -> None:
        self._rules, self._loosened = rules, loosened
        self._name: str = function["name"]
        self._schema: Any = function.get("parameters") or {"type": "object", "properties": {}}

    def rule(self) -> str:
        values = JSONRules(self._rules, self._schema, JSON_TAGS)
        arguments = values.value(self._schema, self._name)
        self._loosened += values.loosened
        opener = literal('{"name": ' + dumps(self._name) + ', "arguments": ')
        return self._rules.add(f"call-{self._name}", f"{opener} {arguments} {literal('}')}")


class _XML:
    """`<function=NAME>`, its parameters in the order in which they are declared, `</function>`."""

    def __init__(self, rules: Rules, function: Mapping[str, Any], loosened: list[str]) -> None:
        self._rules, self._loosened = rules, loosened
        self._name: str = function["name"]
        self._schema: Any = function.get("parameters") or {}
        self._values = JSONRules(rules, self._schema, XML_TAGS)

    def rule(self) -> str:
        if not NAME.fullmatch(self._name):
            raise NotExpressible(f"{self._name[:60]!r} cannot stand in <function=...>")
        schema = merged(self._schema, self._name, self._values.resolve)
        self._loosened += [f"{self._name}: {key}" for key in schema if key not in KNOWN]
        declared, required = schema.get("properties") or {}, schema.get("required") or []
        others = schema.get("additionalProperties", True)
        properties = {**declared, **{key: others for key in required if key not in declared}}
        parameters = [self._parameter(key, inner, key in required) for key, inner in properties.items()]
        self._loosened += self._values.loosened
        opener = literal(f"<function={self._name}>\n")
        return self._rules.add(f"call-{self._name}", " ".join([opener, *filter(None, parameters), literal("</function>")]))

    def _parameter(self, key: str, schema: Any, is_required: bool) -> str:
        path = f"{self._name}.{key}"
        try:
            if not NAME.fullmatch(key):
                raise NotExpressible(f"{path}: it cannot stand in <parameter=...>")
            value = self._value(schema, path)
        except NotExpressible:
            if is_required:
                raise
            return ""  # a parameter that no value fits is never given
        opener = literal(f"<parameter={key}>\n")
        whole = self._rules.add(f"{path}-parameter", f"{opener} {value}")
        return whole if is_required else f"{whole}?"

    def _value(self, schema: Any, path: str, depth: int = 0) -> str:
        """The value and the end of it. Text stands as it is, everything else as JSON."""
        if schema is True or schema == {}:
            return self._any_text()
        if not isinstance(schema, Mapping) or depth > MOST_NESTED:
            return self._json(schema, path)
        if "$ref" in schema or "allOf" in schema:
            return self._value(merged(schema, path, self._values.resolve), path, depth + 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._alternatives(schema, key, path, depth)
        if members := _text_members(schema):
            if any(tag in member for tag in XML_TAGS for member in members):
                raise NotExpressible(f"{path}: a member of the enum holds a tag")
            return f"{either([literal(member) for member in members])} {END}"
        types = types_of(schema)
        if "string" not in types or "enum" in schema or "const" in schema:
            return self._json(schema, path)
        return self._text(schema, path) if types == ("string",) else self._text_or_other(schema, types, path)

    def _alternatives(self, schema: Mapping[str, Any], key: str, path: str, depth: int) -> str:
        beside = {name: value for name, value in schema.items() if name != key}
        wholes = [merged({"allOf": [beside, inner]}, path, self._values.resolve) for inner in schema[key]]
        if any("string" in types_of(whole) and not whole.keys() & {"enum", "const"} for whole in wholes):
            for whole in wholes:
                if whole.keys() - ANNOTATIONS - {"type"}:
                    self._loosened.append(f"{path}: that a text which reads as another type fits that type")
        return either([self._value(whole, path, depth + 1) for whole in wholes])

    def _json(self, schema: Any, path: str) -> str:
        return f"{self._values.value(schema, path)} {END}"

    def _any_text(self) -> str:
        if "any-text" not in self._rules:
            text_until(self._rules, "any-text", END_OF_VALUE, TEXT, XML_TAGS)
        return "any-text"

    def _text(self, schema: Mapping[str, Any], path: str) -> str:
        """Text that is counted or matched holds no `<` at all, and no `\\r`, which would be taken off its end with the line break."""
        allowed = without(TEXT, "<\r")
        least, most, pattern = count_in(schema, "minLength") or 0, count_in(schema, "maxLength"), schema.get("pattern")
        self._loosened += [f"{path}: {keyword}" for keyword in not_said(schema, ("string",))]
        if isinstance(pattern, str):
            if least or most is not None:
                self._loosened.append(f"{path}: minLength and maxLength beside pattern")
            try:
                return f"{pattern_rule(pattern, allowed, lambda code: literal(chr(code)))} {END}"
            except NotExpressible as error:
                self._loosened.append(f"{path}: {error}")
                return self._any_text()
        if schema.get("format") in FORMATS:
            return f"{FORMATS[schema['format']]} {END}"
        least, most = self._values.countable(least, most, path, "characters")
        if not least and most is None:
            return self._any_text()
        return f"{repeat(one_of(allowed), least, most)} {END}"

    def _text_or_other(self, schema: Mapping[str, Any], types: Sequence[str], path: str) -> str:
        """A list of types with text among them. Text covers the plain ones: `null` and 5 can be read either way."""
        others = [kind for kind in types if kind != "string"]
        if schema.keys() - ANNOTATIONS - {"type", "format", "nullable"}:
            return self._json({**schema, "type": others, "nullable": False}, path)
        return self._any_text()


KNOWN = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}


def _text_members(schema: Mapping[str, Any]) -> list[str]:
    """The members of an enum of texts."""
    members = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return members if isinstance(members, list) and members and all(isinstance(member, str) for member in members) else []
