"""Values against schemas, with the schemas that clients really send: broken, endless, pointing at the network."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from a3b_gguf.schema_check import SchemaCheck


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        ({"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}, {"a": [1, "x"]}, "a[1]: 'x' is not of type"),
        ({"type": "integer", "nullable": True}, None, None),
        ({"type": "integer", "nullable": True}, "1", "not valid under any"),
        ({"properties": {"nullable": {"type": "string"}}}, {"nullable": 1}, "nullable: 1 is not"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"maximum": 3}}}, 4, "4 is greater than the maximum"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}, ["x"], "[0]: 'x' is not"),
        (False, 1, "does not allow"),
        (True, 1, None),
        ({"maxLength": 3}, "x" * 5000, "..."),
    ],
)
def test_problems(schema: Any, value: Any, words: str | None) -> None:
    found = SchemaCheck(schema).problem(value)
    assert found is None if words is None else words in str(found)
    assert len(found or "") < 300


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strng"}, {"required": "city"}, {"$ref": "#/$defs/gone"}, {"$ref": "#"}, {"pattern": "("}, {"$schema": []}, nested(3000),
        {"$ref": "https://example.org/schema.json"}, {"$ref": "other.json#/a"},
    ],
)  # fmt: skip
def test_a_schema_that_cannot_judge_lets_pass_and_says_why(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing is fetched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    check = SchemaCheck(schema)
    assert check.problem({"a": "x"}) is None
    assert check.problem("x") is None
    assert check.unusable
