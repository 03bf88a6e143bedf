"""Mends a request where one mending is right and loses nothing; everything else is left for a person.

A fixer changes the request in place and says what it did. It runs only when its rule found something.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from a3b_gguf.prompt.characters import BIDI, C0, SURROGATE, ZERO_WIDTH, hidden_tags, is_blank
from a3b_gguf.prompt.findings import Finding
from a3b_gguf.prompt.fix_calls import CALL_FIXERS
from a3b_gguf.prompt.profiles import Profile
from a3b_gguf.prompt.view import any_of, content_text

Request = dict[str, Any]
Check = Callable[[Mapping[str, Any]], list[Finding]]
MAX_ROUNDS = 5
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was mended: by which rule, where, and what was done."""

    rule: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """value: the mended request or text. left: what a person must look at."""

    value: Any
    changes: tuple[Change, ...]
    left: tuple[Finding, ...]


def fix_request(request: Mapping[str, Any], profile: Profile, check: Check, developer: str = "refuse") -> Fixed:
    """Mends and checks until nothing changes any more. check: verify_request with the caller's policies. `request` is not changed."""
    value: Request = copy.deepcopy(dict(request))
    changes: list[Change] = []
    findings = check(value)
    for _ in range(MAX_ROUNDS):
        rules = {finding.rule for finding in findings}
        made: list[Change] = []
        for rule, fixer in FIXERS:
            if rule in rules and (rule != "M024" or developer == "system"):
                made += [Change(rule, where, what) for where, what in fixer(value, profile)]
        if not made:
            break
        changes += made
        findings = check(value)
    return Fixed(value, tuple(changes), tuple(findings))


Fixer = Callable[[Request, Profile], Iterator[tuple[str, str]]]


def messages_of(request: Request) -> list[dict[str, Any]]:
    found = request.get("messages")
    return [message for message in found if isinstance(message, dict)] if isinstance(found, list) else []


def clean(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    """M006 to M009: characters that no text needs."""
    yield from _over_strings(request, cleaned, "characters that no text needs were removed or replaced")


def cleaned(text: str) -> str:
    text = SURROGATE.sub("\ufffd", text).replace("\r\n", "\n").replace("\r", "\n")
    while tags := hidden_tags(text):
        text = text[: tags.start()] + text[tags.end() :]
    return re.sub(f"[{ZERO_WIDTH}{BIDI}]", "", C0.sub("", text))


def _over_strings(request: Request, change: Callable[[str], str], what: str) -> Iterator[tuple[str, str]]:
    """Applies `change` to every string below messages and tools, keys included, and says where it made a difference."""
    for key in ("messages", "tools"):
        found: list[str] = []
        request_value = request.get(key)
        if request_value is not None:
            request[key] = _mapped(request_value, change, key, found)
        yield from ((where, what) for where in found)


def _mapped(value: Any, change: Callable[[str], str], where: str, found: list[str]) -> Any:
    if isinstance(value, str):
        new = change(value)
        if new != value:
            found.append(where)
        return new
    if isinstance(value, list):
        return [_mapped(item, change, f"{where}[{index}]", found) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {change(key): _mapped(item, change, f"{where}.{key}", found) for key, item in value.items()}
    return value


def spell_roles(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        role = message.get("role")
        meant = "".join(ch for ch in role if ch.isalpha()).lower() if isinstance(role, str) else ""
        if meant in ("system", "user", "assistant", "tool") and meant != role:
            message["role"] = meant
            yield f"messages[{index}].role", f"{role!r} became {meant!r}"


def map_developer(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        if message.get("role") == "developer":
            message["role"] = "system"
            yield f"messages[{index}].role", "'developer' became 'system'"


def name_content(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        for key in ("message", "text", "contents"):
            if isinstance(message.get(key), str) and "content" not in message:
                message["content"] = message.pop(key)
                yield f"messages[{index}].{key}", f"{key!r} became 'content'"


def one_system_in_front(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    """M031, M032: the texts of all system messages, in their order, as the first message."""
    messages = request["messages"]
    found = [(index, message) for index, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "system"]
    texts = [content_text(message.get("content")) for _, message in found]
    if not found or any(text is None for text in texts):
        return
    first = dict(found[0][1])
    if len(found) > 1:
        first["content"] = "\n\n".join(text for text in texts if text)
    others = [message for message in messages if not (isinstance(message, dict) and message.get("role") == "system")]
    request["messages"] = [first, *others]
    for index, _ in found:
        if index:
            yield f"messages[{index}]", "was moved to the front" if len(found) == 1 else "was merged into messages[0]"


def drop_empty_system(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    kept = []
    for index, message in enumerate(request["messages"]):
        text = content_text(message.get("content")) if isinstance(message, dict) else None
        if text is not None and message.get("role") == "system" and is_blank(text):
            yield f"messages[{index}]", "an empty system message was left out"
        else:
            kept.append(message)
    request["messages"] = kept


def join_system(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        parts = message.get("content")
        if message.get("role") == "system" and isinstance(parts, list) and all(_is_text(part) for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
            yield f"messages[{index}].content", "the parts were joined to one string"


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def trim_system(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, str) and content != content.strip():
            message["content"] = content.strip()
            yield f"messages[{index}].content", "whitespace around it was removed"


def merge_users(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    kept: list[Any] = []
    for index, message in enumerate(request["messages"]):
        before = kept[-1] if kept else None
        if before is not None and _is_plain_user(message) and _is_plain_user(before):
            before["content"] = f"{before['content']}\n\n{message['content']}"
            yield f"messages[{index}]", "was merged into the user message before it"
        else:
            kept.append(message)
    request["messages"] = kept


def _is_plain_user(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str)


def content_to_text(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        content = message.get("content")
        if isinstance(content, (bool, int, float, dict)):
            message["content"] = json.dumps(content, ensure_ascii=False)
            yield f"messages[{index}].content", "became its JSON text"


def fill_content(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        if message.get("role") == "tool" and message.get("content") is None:
            message["content"] = ""
            yield f"messages[{index}].content", 'a result without content became ""'


def drop_empty_parts(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        parts = message.get("content")
        if isinstance(parts, list):
            kept = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "text" and part.get("text") is None)]
            if len(kept) != len(parts) and kept:
                message["content"] = kept
                yield f"messages[{index}].content", "text parts without text were left out"


def break_controls(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    """M055, M057, M076, M091: a space behind the first character of every control text, outside of an answer's own think tags."""
    pattern = any_of(tuple(dict.fromkeys((*profile.controls, *TAGS))))
    if pattern is None:
        return

    def broken(text: str) -> str:
        return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    what = "a space was put into control texts"
    for index, message in enumerate(messages_of(request)):
        found: list[str] = []
        keep = message.get("role") == "assistant"
        for key, value in list(message.items()):
            if key != "role" and not (keep and key in ("content", "reasoning_content", "tool_calls")):
                message[key] = _mapped(value, broken, f"messages[{index}].{key}", found)
        yield from ((where, what) for where in found)
    if isinstance(request.get("tools"), list):
        found = []
        request["tools"] = _mapped(request["tools"], broken, "tools", found)
        yield from ((where, what) for where in found)


def thinking_to_its_key(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, str) or message.get("reasoning_content"):
            continue
        match = THOUGHT.match(content)
        if match and "<think>" not in match[1] and not any(tag in content[match.end() :] for tag in ("<think>", "</think>")):
            message["reasoning_content"], message["content"] = match[1].strip("\n"), content[match.end() :]
            yield f"messages[{index}]", "the think block became reasoning_content"


def reasoning_to_its_place(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages_of(request)):
        for key in ("reasoning", "thinking"):
            if message.get("role") == "assistant" and isinstance(message.get(key), str) and "reasoning_content" not in message:
                message["reasoning_content"] = message.pop(key)
                yield f"messages[{index}].{key}", "became reasoning_content"


def drop_add_generation(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    del request["add_generation_prompt"]
    yield "add_generation_prompt", "was removed: continue_final_message says it all"


TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}


def thinking_to_boolean(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    options = request.get("chat_template_kwargs")
    if not isinstance(options, dict) or isinstance(options.get("enable_thinking"), bool):
        return
    meant = TRUTH.get(str(options.get("enable_thinking")).lower())
    if meant is not None:
        options["enable_thinking"] = meant
        yield "chat_template_kwargs.enable_thinking", f"became {str(meant).lower()}"


def drop_options(request: Request, profile: Profile) -> Iterator[tuple[str, str]]:
    options = request["chat_template_kwargs"]
    known = profile.variables or frozenset()
    for key in [key for key in options if key not in known]:
        del options[key]
        yield f"chat_template_kwargs.{key}", "was removed: the template does not read it"


FIXERS: Sequence[tuple[str, Fixer]] = (
    *((rule, clean) for rule in ("M006", "M007", "M008", "M009")),
    ("M023", spell_roles),
    ("M024", map_developer),
    ("M026", name_content),
    ("M033", drop_empty_system),
    ("M034", join_system),
    ("M031", one_system_in_front),
    ("M032", one_system_in_front),
    ("M035", trim_system),
    ("M050", fill_content),
    ("M051", content_to_text),
    ("M053", drop_empty_parts),
    ("M056", thinking_to_its_key),
    *((rule, break_controls) for rule in ("M055", "M056", "M057", "M076", "M091")),
    ("M062", reasoning_to_its_place),
    ("M042", merge_users),
    ("M048", drop_add_generation),
    ("M100", thinking_to_boolean),
    ("M101", drop_options),
    ("M103", drop_options),
    *CALL_FIXERS,
)
