"""The grammar of an answer that is JSON of a schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from a3b_gguf.grammar.free_text import text_until
from a3b_gguf.grammar.gbnf import TEXT, Rules
from a3b_gguf.grammar.json_schema import JSONRules

ROOT = "root"
# Between the reasoning and what follows; templates write one blank line.
BEHIND_REASONING = '"\\n"{0,2}'


@dataclass(frozen=True, slots=True)
class Constraint:
    """text: the grammar, from rule `root` on. loosened: what the values must satisfy and the grammar does not say, with its place."""

    text: str
    loosened: tuple[str, ...] = ()


def answer_grammar(schema: Any, in_thinking: bool) -> Constraint:
    """An answer that is a JSON value of `schema`; in_thinking: the reasoning comes first, as free text up to its `</think>`.

    Raises NotExpressible for a schema that no value fits, that points outside of itself, or that is none.
    """
    rules = Rules()
    values = JSONRules(rules, schema)
    rules.set(ROOT, "")
    rules.set(ROOT, f"{reasoning(rules, in_thinking)}{values.value(schema, 'answer')}")
    return Constraint(rules.text(), tuple(values.loosened))


def json_object_grammar(in_thinking: bool) -> Constraint:
    """An answer that is any JSON object."""
    return answer_grammar({"type": "object"}, in_thinking)


def reasoning(rules: Rules, in_thinking: bool) -> str:
    """What stands before the answer: nothing, or the rest of the reasoning."""
    return f"{text_until(rules, 'reasoning', '</think>', TEXT)} {BEHIND_REASONING} " if in_thinking else ""
