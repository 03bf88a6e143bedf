"""Grammars that a model's output is held to while it is drawn: for an answer of a JSON Schema, and for calls of declared tools.

    constraint = answer_grammar(schema, in_thinking)                     response_format
    constraint = call_grammar(tools, style, in_thinking, parallel)       tool_choice required, or one tool by name
    constraint.text        GBNF, llama.cpp's notation, from rule `root` on
    constraint.loosened    what of the schema the grammar does not hold the model to; check the value afterwards

A grammar allows less than its schema or as much, never more, but for what `loosened` names. NotExpressible: there is no such grammar.
GBNF: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from a3b_gguf.grammar.answer import Constraint, answer_grammar, json_object_grammar
from a3b_gguf.grammar.calls import NO_ANSWER, Style, call_grammar
from a3b_gguf.grammar.gbnf import NotExpressible

__all__ = ["NO_ANSWER", "Constraint", "NotExpressible", "Style", "answer_grammar", "call_grammar", "json_object_grammar"]
