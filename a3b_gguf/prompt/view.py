"""A request as rules see it. Whatever JSON a client sent, these views can be read without a type error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from a3b_gguf.prompt.characters import ODD
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.template import Template

SystemPolicy = Literal["optional", "required"]
DeveloperPolicy = Literal["refuse", "system"]
Path = tuple["Path | None", str]  # of a value in JSON: the path of what holds it, and one step
WALKED = (str, float, list, Mapping)
PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One message that is an object. role: as sent, "" when it is no string. calls: its tool calls, parts: those of its content, none when
    they are no list. text: its content as the template will get it, parts joined; None when there is none."""

    index: int
    message: Mapping[str, Any]
    role: str
    content: Any
    calls: list[Any]
    parts: list[Any]
    text: str | None

    @property
    def where(self) -> str:
        return f"messages[{self.index}]"

    @property
    def title(self) -> str:
        """Its role where that is a word, for messages."""
        return self.role if self.role.isascii() and self.role.isidentifier() else "nameless"


@dataclass(frozen=True, slots=True)
class RequestView:
    """messages: as sent, none when they are not a list. entries: those that are objects. odd: strings of the request, keys included,
    that hold a surrogate, a control or an invisible character; wide: those beyond ASCII. controls: finds any control text."""

    request: Mapping[str, Any]
    profile: Profile
    system: SystemPolicy
    messages: list[Any]
    entries: tuple[Entry, ...]
    odd: tuple[tuple[Path, str], ...]
    wide: tuple[tuple[Path, str], ...]
    controls: re.Pattern[str] | None
    template: Template | None = None
    developer: DeveloperPolicy = "refuse"
    complete: bool = False

    def of_role(self, role: str) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.role == role)

    @property
    def tools(self) -> list[Any]:
        """The tools, none when they are not a list."""
        found = self.request.get("tools")
        return found if isinstance(found, list) else []

    @property
    def options(self) -> Mapping[str, Any]:
        """chat_template_kwargs, none when they are no object."""
        found = self.request.get("chat_template_kwargs")
        return found if isinstance(found, Mapping) else {}

    @property
    def thinking(self) -> bool:
        """Whether the answer will begin with thinking."""
        asked = self.options.get("enable_thinking", self.request.get("enable_thinking"))
        return self.profile.thinks and asked is not False


def view_request(
    request: Mapping[str, Any],
    profile: Profile,
    system: SystemPolicy = "optional",
    template: Template | None = None,
    developer: DeveloperPolicy = "refuse",
    complete: bool = False,
) -> RequestView:
    found = request.get("messages")
    messages = found if isinstance(found, list) else []
    entries = tuple(_entry(index, message) for index, message in enumerate(messages) if isinstance(message, Mapping))
    unusual = tuple(_unusual(request, messages))
    odd, wide = tuple(found for found in unusual if ODD.search(found[1])), tuple(found for found in unusual if not found[1].isascii())
    return RequestView(request, profile, system, messages, entries, odd, wide, any_of(profile.controls), template, developer, complete)


def _entry(index: int, message: Mapping[str, Any]) -> Entry:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    return Entry(
        index,
        message,
        role if isinstance(role, str) else "",
        content,
        calls if isinstance(calls, list) else [],
        content if isinstance(content, list) else [],
        content if isinstance(content, str) else content_text(content),
    )


def _unusual(request: Mapping[str, Any], messages: list[Any]) -> Iterator[tuple[Path, str]]:
    """Strings with characters that are odd or beyond ASCII. Messages of nothing but short keys and strings, as nearly all are, are not
    walked: this is most of the time that a check takes."""
    root: Path = (None, "$")
    for index, message in enumerate(messages):
        if type(message) is dict and message.keys() <= PLAIN_KEYS and all(type(value) is str for value in message.values()):
            for key, text in message.items():
                if not text.isascii() or ODD.search(text):
                    yield (((root, ".messages"), f"[{index}]"), step(key)), text
        else:
            yield from (found for found in _below(((root, ".messages"), f"[{index}]"), message) if _is_unusual(found[1]))
    others = {key: value for key, value in request.items() if value is not messages}
    yield from (found for found in _below(root, others) if _is_unusual(found[1]))


PLAIN_KEYS = frozenset(("role", "content", "name", "reasoning_content", "tool_call_id"))


def _is_unusual(text: str) -> bool:
    return not text.isascii() or ODD.search(text) is not None


@lru_cache(maxsize=64)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    """A pattern that finds the longest of `texts` at each place; None when there are none."""
    if not texts:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def content_text(content: Any) -> str | None:
    """A string as it is; the texts of a list of parts joined without separator, as the templates that take lists join them; else None."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))
    return None


def walk(value: Any, where: str) -> Iterator[tuple[Path, Any, int]]:
    """Every object, list, string and float below `value`, itself first: its path, itself, its depth. Keys are not yielded.

    Paths are chains, since nearly none is ever written out: `path_text` does that.
    """
    yield from _walk((None, where), value)


def _walk(root: Path, value: Any) -> Iterator[tuple[Path, Any, int]]:
    stack: list[tuple[Path, Any, int]] = [(root, value, 1)]
    while stack:
        path, found, depth = stack.pop()
        yield path, found, depth
        if isinstance(found, Mapping):
            inner = [((path, step(key)), item, depth + 1) for key, item in found.items() if isinstance(item, WALKED)]
        elif isinstance(found, list):
            inner = [((path, f"[{index}]"), item, depth + 1) for index, item in enumerate(found) if isinstance(item, WALKED)]
        else:
            continue
        stack += reversed(inner)


def path_text(path: Path) -> str:
    """`messages[2].content` of a path."""
    steps = []
    at: Path | None = path
    while at is not None:
        steps.append(at[1])
        at = at[0]
    return "".join(reversed(steps)).removeprefix("$.")


def strings(value: Any, where: str) -> Iterator[tuple[Path, str]]:
    """Every string below `value`, keys included, with the path of the string or of the value under the key."""
    return _below((None, where), value)


def _below(root: Path, value: Any) -> Iterator[tuple[Path, str]]:
    for path, found, _ in _walk(root, value):
        if isinstance(found, str):
            yield path, found
        elif isinstance(found, Mapping):
            yield from (((path, step(key)), key) for key in found if isinstance(key, str))


def step(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and PLAIN_KEY.fullmatch(key) else f"[{key!r}]"


def kind(value: Any) -> str:
    """What JSON calls the type of `value`."""
    if value is None:
        return "null"
    names = ((bool, "a boolean"), (str, "a string"), (int, "a number"), (float, "a number"), (list, "a list"), (Mapping, "an object"))
    return next((name for python_type, name in names if isinstance(value, python_type)), type(value).__name__)


def shown(text: str, limit: int = 40) -> str:
    """`text` in quotes, escaped and cut so that a message stays on one line and printable."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return ascii(cut) if any(not ch.isprintable() for ch in cut) else repr(cut)
