"""What comes out of a model's output: reasoning, content, calls, and remarks on what was wrong with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A further piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A further piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A further piece of a call's arguments; for those who show a call before it is whole. What is out is never taken back.

    Every ToolCall comes after its deltas, whose pieces joined are its arguments. Deltas without a ToolCall after them are a call that
    was cut off or broke: its JSON is never closed, so that nobody can take it for one. is_first: the call's id and name are new.
    """

    index: int
    id: str
    name: str
    arguments: str
    is_first: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a declared tool. index: place among the calls; arguments: a compact JSON object, as OpenAI clients expect it."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A remark with a stable rule id O0xx. raw: text of the output that became neither content nor a call, else empty."""

    rule: str
    message: str
    raw: str = ""


Event = Reasoning | Content | ToolCallDelta | ToolCall | Diagnostic
