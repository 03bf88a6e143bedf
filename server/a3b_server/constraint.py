"""What an answer is held to: a schema (response_format), a call of a tool (tool_choice), or a grammar of the client's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.grammar import NO_ANSWER, Constraint, NotExpressible, Style, answer_grammar, call_grammar
from a3b_gguf.llama.sampling import Grammar
from a3b_gguf.schema_check import SchemaCheck
from a3b_gguf.strict_json import NotJSON, loads
from a3b_server.errors import APIError
from a3b_server.schema import ChatRequest
from a3b_server.service import Service

Tools = tuple[dict[str, Any], ...]
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_TOOLS: Tools = ()


@dataclass(frozen=True, slots=True)
class Held:
    """grammar: what the engine holds the answer to, None when it is free. check: judges an answer that should be JSON of a schema.

    tools: those that may be called. one_call: the answer ends with its first call. warnings: what is only checked afterwards.
    """

    tools: Tools = NO_TOOLS
    grammar: Grammar | None = None
    check: SchemaCheck | None = None
    one_call: bool = False
    warnings: tuple[str, ...] = ()


def held_to(request: ChatRequest, service: Service, in_thinking: bool) -> Held:
    """What the request asks for. A schema that no grammar says is checked afterwards, with a warning.

    Raises APIError 400 for a grammar that cannot be followed.
    """
    tools = chosen_tools(request)
    one_call = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
    if request.grammar:
        return Held(tools, own_grammar(request.grammar, service), one_call=one_call)
    schema = _schema(request)
    check = None if schema is None else SchemaCheck(schema)
    must_call = request.tool_choice == "required" or isinstance(request.tool_choice, dict)
    if tools and (must_call or check is not None):
        style: Style = "json" if service.profile.call_style == "json" else "xml"
        functions = [tool["function"] for tool in tools]
        answer = NO_ANSWER if must_call else schema
        field = "tool_choice" if must_call else "response_format"
        grammar, warnings = _grammar(lambda: call_grammar(functions, style, in_thinking, not one_call, answer), field, service)
        return Held(tools, grammar, None if must_call else check, one_call, warnings)
    if check is None:
        return Held(tools, one_call=one_call)
    grammar, warnings = _grammar(lambda: answer_grammar(schema, in_thinking), "response_format", service)
    return Held(tools, grammar, check, one_call, warnings)


def chosen_tools(request: ChatRequest) -> Tools:
    """The tools that the answer may call. A choice that means nothing was refused before, by rule M078."""
    choice, tools = request.tool_choice, tuple(request.tools or ())
    if choice == "none":
        return ()
    if not isinstance(choice, dict):
        return tools
    function = choice.get("function")
    return tuple(tool for tool in tools if isinstance(function, dict) and tool["function"]["name"] == function.get("name"))


def _schema(request: ChatRequest) -> Any:
    """The schema of the answer, None when it may be any text."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT if wanted.schema_ is None else wanted.schema_
    return wanted.json_schema.schema_ if wanted.json_schema else None


def _grammar(make: Callable[[], Constraint], field: str, service: Service) -> tuple[Grammar | None, tuple[str, ...]]:
    """The grammar, or none with the reason, and what it leaves open."""
    try:
        constraint = make()
    except NotExpressible as error:
        return None, (f"{field}: no grammar can say this, so the answer is free and checked afterwards: {error}",)
    grammar = Grammar(constraint.text)
    fault = service.grammar_fault(grammar)
    if fault is not None:
        return None, (f"{field}: the engine cannot follow the grammar, so the answer is free and checked afterwards: {fault}",)
    return grammar, tuple(f"{field}: not held to while it is drawn, checked afterwards: {said}" for said in constraint.loosened)


def own_grammar(text: str, service: Service) -> Grammar:
    """A client's own GBNF. Raises APIError 400 when the engine cannot follow it."""
    grammar = Grammar(text)
    fault = service.grammar_fault(grammar)
    if fault is not None:
        raise APIError(400, f"grammar: {fault}", "invalid_value", "grammar")
    return grammar


def problems(held: Held, content: str, has_calls: bool) -> Sequence[str]:
    """What is wrong with a whole answer that should be JSON of a schema."""
    if held.check is None or has_calls:
        return ()
    try:
        value = loads(content)
    except NotJSON as error:
        return (f"the answer is not JSON: {error}",)
    problem = held.check.problem(value)
    return () if problem is None else (f"the answer does not fit its schema: {problem}",)
