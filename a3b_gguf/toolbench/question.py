"""A question, the calls that are right for it, and what the tools would answer. Read from TOML files beside this one.

A file has `[tools.NAME]` tables (description, parameters: JSON schema by parameter, required: all when left out) and `[[question]]`
tables: block, title, tools (names), user (or `messages`), and `[[question.step]]` tables, each one answer of the assistant:
calls (name, arguments, result), or none, and then what the final text must hold (`answer`: any of) and must not (`never`).
An argument `{ any = [...] }` accepts any of the values, texts without regard to case and outer blanks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3b_gguf.errors import BadInput, UsageError

FOLDER = Path(__file__).parent / "sets"
SMALL_TALK = (
    ("Do you like rain?", "I have no window, but many people find the sound of rain calming."),
    ("Tell me something about lighthouses.", "Lighthouses mark coasts and shoals; many were kept by families for generations."),
    ("What do bees do in winter?", "They form a cluster around the queen and keep it warm by moving their flight muscles."),
    ("Why is bread called bread?", "The word is old Germanic and once meant a piece or a morsel."),
)
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """A right call. arguments: values, or {"any": [...]}; result: what the tool answers."""

    name: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the assistant. Without calls it is the last: answer: texts of which the content must hold one; never: none of them."""

    calls: tuple[Expected, ...] = ()
    answer: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """number: its place in the set; quotes: whether the answer may show tool-call markup; parity: asked with thinking on and off."""

    number: int
    block: str
    title: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    steps: tuple[Step, ...]
    quotes: bool = False
    parity: bool = False


def names() -> list[str]:
    """The sets that come with a3b."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_questions(name: str) -> tuple[Question, ...]:
    """The questions of a set that comes with a3b, or of a TOML file. Raises UsageError, or BadInput with the question and the key."""
    path = FOLDER / f"{name}.toml" if name in names() else Path(name)
    if not path.is_file():
        raise UsageError(f"--questions: there is no set {name!r}, and no such file", f"sets: {', '.join(names())}")
    try:
        held = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} is not a set of questions: {error}", "see a3b_gguf/toolbench/sets/general.toml for the form") from error
    questions, tools = held.get("question"), held.get("tools", {})
    if not isinstance(questions, list) or not questions:
        raise BadInput(f"{path} has no [[question]] table", "see a3b_gguf/toolbench/sets/general.toml for the form")
    found = []
    for number, table in enumerate(questions, 1):
        try:
            found.append(_question(number, table, tools))
        except (KeyError, TypeError, AttributeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is not of the right form: {error}"
            raise BadInput(f"{path}: question {number} {what}", "see a3b_gguf/toolbench/sets/general.toml for the form") from error
    return tuple(found)


def _question(number: int, table: Mapping[str, Any], tools: Mapping[str, Any]) -> Question:
    talk: list[Message] = [{"role": "system", "content": table["system"]}] if "system" in table else []
    talk += small_talk(table.get("small_talk_turns", 0))
    if "long_text_characters" in table:
        talk += [{"role": "user", "content": long_text(table["long_text_characters"])}, {"role": "assistant", "content": "I have read it."}]
    talk += table.get("messages", [])
    if "user" in table:
        payload = payload_of(table)
        talk.append({"role": "user", "content": table["user"].replace("{payload}", payload)})
    return Question(
        number=number,
        block=table["block"],
        title=table["title"],
        messages=tuple(talk),
        tools=tuple(function(name, tools[name]) for name in table["tools"]),
        steps=tuple(_step(step, payload_of(table)) for step in table.get("step", [{}])),
        quotes=table.get("quotes", False),
        parity=table.get("parity", False),
    )


def _step(table: Mapping[str, Any], payload: str) -> Step:
    calls = tuple(
        Expected(call["name"], {key: _filled(value, payload) for key, value in call["arguments"].items()}, call.get("result", "done"))
        for call in table.get("calls", [])
    )
    return Step(calls, tuple(table.get("answer", ())), tuple(table.get("never", ())), table.get("optional", False))


def _filled(value: Any, payload: str) -> Any:
    return value.replace("{payload}", payload) if isinstance(value, str) else value


def payload_of(table: Mapping[str, Any]) -> str:
    """The text that a question wants written down, byte for byte."""
    if "payload_characters" in table:
        return long_text(table["payload_characters"])
    return str(table.get("payload", ""))


def small_talk(n_turns: int) -> list[Message]:
    """Turns that have nothing to do with tools; the same for the same number."""
    turns = [SMALL_TALK[i % len(SMALL_TALK)] for i in range(n_turns)]
    return [m for ask, say in turns for m in ({"role": "user", "content": ask}, {"role": "assistant", "content": say})]


def long_text(n_characters: int) -> str:
    """Numbered plain lines, `n_characters` long, the last character not blank; the same for the same number."""
    lines = (f"{i}. The {('north', 'east', 'south', 'west')[i % 4]} gate was counted {i * 7 % 100} times." for i in range(1, n_characters))
    text = ""
    for line in lines:
        text += line + "\n"
        if len(text) > n_characters:
            break
    return text[: n_characters - 1].rstrip() + "."


def function(name: str, table: Mapping[str, Any]) -> Message:
    """A tool as a request declares it."""
    properties = table["parameters"]
    required: Sequence[str] = table.get("required", list(properties))
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": table["description"], "parameters": schema}}
