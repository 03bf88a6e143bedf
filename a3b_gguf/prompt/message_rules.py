"""Rules over messages one by one: their shape, role, content, and the characters in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import RequestView, kind, shown, step

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "image_url", "video")
# What a message may hold; the second line is what OpenAI's own client sends back, mostly null.
KNOWN_KEYS = frozenset((
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content",
    "refusal", "annotations", "audio", "function_call",
))  # fmt: skip
# What other programs call reasoning_content.
OTHER_REASONING = ("reasoning", "thinking")


def messages_present(view: RequestView) -> Iterator[Hit]:
    found = view.request.get("messages")
    if not isinstance(found, list):
        yield Hit("messages", f"expected a list of messages, found {kind(found) if 'messages' in view.request else 'nothing'}")
    elif not found:
        yield Hit("messages", "the list of messages is empty")


def each_is_object(view: RequestView) -> Iterator[Hit]:
    for index, message in enumerate(view.messages):
        if not isinstance(message, Mapping):
            yield Hit(f"messages[{index}]", f"expected an object with role and content, found {kind(message)}")


def role_is_string(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        if not isinstance(entry.message.get("role"), str):
            yield Hit(f"{entry.where}.role", "role is missing" if "role" not in entry.message else f"role is {kind(entry.message['role'])}")


def role_is_known(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        role = entry.message.get("role")
        if not isinstance(role, str) or role in (*ROLES, "developer", "function"):
            continue
        meant = "".join(ch for ch in role if ch.isalpha()).lower()
        fix = f"write {meant!r}, exactly" if meant in ROLES else ""
        yield Hit(f"{entry.where}.role", f"there is no role {shown(role)}; templates drop such a message or fail", fix)


def no_developer(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("developer"):
        if view.developer == "system":
            message = "role 'developer' becomes part of the system message"
            yield Hit(f"{entry.where}.role", message, "write it into the system message", "warning")
        else:
            yield Hit(f"{entry.where}.role", "the templates of this family have no role 'developer'")


def no_function(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("function"):
        yield Hit(f"{entry.where}.role", "role 'function' is the old form of a tool's result")


def keys_are_known(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        for key in entry.message:
            if key not in KNOWN_KEYS and key not in OTHER_REASONING:
                fix = "write it as `content`" if key in ("message", "text", "contents") else ""
                yield Hit(entry.where + step(key), f"key {shown(key)} has no effect", fix)


def reasoning_has_its_name(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        for key in OTHER_REASONING:
            if key in entry.message:
                yield Hit(entry.where + step(key), f"key {key!r} is dropped by the template, which reads reasoning_content")


def content_present(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        if entry.content is None and not (entry.role == "assistant" and entry.calls):
            what = "null" if "content" in entry.message else "missing"
            yield Hit(f"{entry.where}.content", f"content of a {entry.title} message is {what}")


def content_type(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        if not (entry.content is None or isinstance(entry.content, (str, list))):
            yield Hit(f"{entry.where}.content", f"content is {kind(entry.content)}, expected a string or a list of parts")


def part_types(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        for index, part in enumerate(entry.parts):
            where = f"{entry.where}.content[{index}]"
            if not isinstance(part, Mapping):
                yield Hit(where, f"a part of the content is {kind(part)}, expected an object")
            elif part.get("type") not in ("text", *MEDIA):
                yield Hit(f"{where}.type", f"a part of type {shown(str(part.get('type')))} cannot be read, expected 'text'")


def parts_have_text(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        if entry.content == []:
            yield Hit(f"{entry.where}.content", "the list of parts is empty")
        for index, part in enumerate(entry.parts):
            if not isinstance(part, Mapping) or part.get("type") != "text":
                continue
            text, where = part.get("text"), f"{entry.where}.content[{index}].text"
            if text is None:
                yield Hit(where, "a text part without text")
            elif not isinstance(text, str):
                yield Hit(where, f"the text of a part is {kind(text)}", "make it a string", severity="error")


def no_media(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        for index, part in enumerate(entry.parts):
            if isinstance(part, Mapping) and part.get("type") in MEDIA:
                yield Hit(f"{entry.where}.content[{index}]", f"a part of type {part['type']!r}: this model is served for text only")


def reasoning_is_the_assistants(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        found = entry.message.get("reasoning_content")
        if found is None:
            continue
        if entry.role != "assistant":
            yield Hit(f"{entry.where}.reasoning_content", f"reasoning_content on a {entry.title} message")
        elif not isinstance(found, str):
            yield Hit(f"{entry.where}.reasoning_content", f"reasoning_content is {kind(found)}, expected a string")


SHAPE_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M020", "error", "`messages` is a list that is not empty.", "send at least one user message", messages_present),
    Rule("M021", "error", "Each message is an object.", 'write {"role": ..., "content": ...}', each_is_object),
    Rule("M022", "error", "Each message has a role, a string.", "add one of system, user, assistant, tool", role_is_string),
    Rule(
        "M023", "error", "The role is exactly system, user, assistant or tool.", "use one of system, user, assistant, tool", role_is_known
    ),
    Rule(
        "M024",
        "error",
        "No `developer` role; with `--map-developer` a warning.",
        "use role 'system' for the first message, else 'user'",
        no_developer,
    ),
    Rule("M025", "error", "No `function` role.", "use role 'tool' with tool_call_id", no_function),
    Rule("M026", "warning", "A message has no unknown keys.", "remove it", keys_are_known),
)
CONTENT_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M050",
        "error",
        "Content is there; null only beside tool_calls of an assistant.",
        'send text, or "" if there is none',
        content_present,
    ),
    Rule("M051", "error", "Content is a string or a list of parts.", "send a string", content_type),
    Rule("M052", "error", "Parts are objects of type text.", 'write {"type": "text", "text": ...}', part_types),
    Rule(
        "M053", "warning", "Parts have text, and there is at least one; a text that is no string is an error.", "remove it", parts_have_text
    ),
    Rule("M054", "error", "No images or videos for a model that is served for text.", "remove the part", no_media),
    Rule(
        "M060",
        "error",
        "`reasoning_content` is a string, on assistant messages only.",
        "move it to the assistant's message, or drop it",
        reasoning_is_the_assistants,
    ),
    Rule("M062", "warning", "Reasoning is called `reasoning_content`.", "rename the key to reasoning_content", reasoning_has_its_name),
)
