"""Rules against text that would become a control token: what a user writes must stay text.

llama.cpp turns CONTROL and USER_DEFINED token texts into tokens wherever they occur in a prompt; even with parse_special off
the USER_DEFINED ones (llama-vocab.cpp, tokenizer_st_partition). `tokens.tokenize_rendered` keeps them as text; a client that sends
them mostly did not mean to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from a3b_gguf.prompt.characters import folded
from a3b_gguf.prompt.findings import Hit, Rule, Severity
from a3b_gguf.prompt.view import Entry, Path, RequestView, path_text, shown, strings
from a3b_gguf.strict_json import NotJSON, loads

THINK_TAGS = ("<think>", "</think>")
CALL_TAGS = ("<tool_call>", "</tool_call>")
RESULT_TAGS = ("<tool_response>", "</tool_response>")
# Texts that a rule of their own speaks about, by role: M056, M057, M091, M093.
OF_OTHER_RULES: dict[str, frozenset[str]] = {
    "system": frozenset((*THINK_TAGS, *CALL_TAGS, *RESULT_TAGS)),
    "user": frozenset((*THINK_TAGS, *CALL_TAGS, *RESULT_TAGS)),
    "assistant": frozenset((*THINK_TAGS, *CALL_TAGS)),
    "tool": frozenset((*THINK_TAGS, "</tool_response>")),
}


def no_control_text(view: RequestView) -> Iterator[Hit]:
    if view.controls is None:
        return
    for entry in view.entries:
        if entry.text is not None and view.controls.search(entry.text):
            yield from _control_hits(view, (None, f"{entry.where}.content"), entry.text, OF_OTHER_RULES.get(entry.role, frozenset()))
        for path, text in _other_texts(entry):
            yield from _control_hits(view, path, text)


def no_control_text_in_tools(view: RequestView) -> Iterator[Hit]:
    for path, text in strings(view.request.get("tools"), "tools"):
        yield from _control_hits(view, path, text)


def no_inline_thinking(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        text = entry.text or ""
        tag = next((tag for tag in THINK_TAGS if tag in text), None)
        if tag is None:
            continue
        where, at = f"{entry.where}.content", text.index(tag)
        if entry.role == "assistant":
            yield Hit(where, f"{tag} in an assistant's text: templates cut the text there", severity="warning", at=at)
        else:
            fix = "remove or escape it, such as '< think>'"
            yield Hit(where, f"{tag} in a {entry.title} message would begin or end the model's thinking", fix, at=at)


def no_inline_calls(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        text = entry.text or ""
        tag = next((tag for tag in (*CALL_TAGS, *RESULT_TAGS) if tag in text), None)
        if tag is None or entry.role not in ("user", "system"):
            continue
        severity: Severity | None = None if entry.role == "user" else "warning"
        message = f"{tag} in a {entry.title} message reads as a call or its result"
        yield Hit(f"{entry.where}.content", message, severity=severity, at=text.index(tag))


def no_look_alikes(view: RequestView) -> Iterator[Hit]:
    if view.controls is None:
        return
    for path, text in view.wide:
        if "<" not in text and "＜" not in text and "﹤" not in text:
            continue
        found = view.controls.search(folded(text))
        if found and not view.controls.search(text):
            yield Hit(path_text(path), f"looks like {found[0]} once compatibility forms and invisible characters are gone")


def thinking_is_sent_once(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("assistant"):
        if entry.message.get("reasoning_content") and any(tag in (entry.text or "") for tag in THINK_TAGS):
            yield Hit(entry.where, "reasoning_content and think tags in the content: the prompt would hold two think blocks")


def _other_texts(entry: Entry) -> Iterator[tuple[Path, str]]:
    """Every string of a message but its role and content, arguments also as what they parse to."""
    if entry.message.keys() <= {"role", "content"}:
        return
    yield from strings({key: value for key, value in entry.message.items() if key not in ("role", "content")}, entry.where)
    for index, call in enumerate(entry.calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and "\\" in arguments:  # an escape may hide what the parsed value shows
            try:
                value = loads(arguments)
            except NotJSON:  # M082 reports it
                continue
            yield from strings(value, f"{entry.where}.tool_calls[{index}].function.arguments")


def _control_hits(view: RequestView, path: Path, text: str, allowed: frozenset[str] = frozenset()) -> Iterator[Hit]:
    if view.controls is None:
        return
    found = [match for match in view.controls.finditer(text) if match[0] not in allowed]
    if found:
        first = found[0][0]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        yield Hit(
            path_text(path),
            f"{shown(first)} at character {found[0].start()} would become a control token{more}",
            f"break it up, such as {first[0] + ' ' + first[1:]!r}" if len(first) > 1 else "",
            at=found[0].start(),
        )


CONTROL_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M055", "error", "No text in a message that the vocabulary turns into a control token.", "remove or escape it", no_control_text),
    Rule(
        "M056",
        "error",
        "No `<think>` or `</think>` in content; in an assistant's, where templates cut at it, a warning.",
        "send it as reasoning_content",
        no_inline_thinking,
    ),
    Rule(
        "M057",
        "error",
        "No `<tool_call>` or `<tool_response>` tags in a user's content; in the system message a warning.",
        "escape it, such as '< tool_call>'",
        no_inline_calls,
    ),
    Rule("M058", "warning", "Nothing that only looks like a control text.", "write it in plain letters, or remove it", no_look_alikes),
    Rule("M061", "warning", "Thinking is sent once: as reasoning_content or in tags.", "keep one of the two", thinking_is_sent_once),
    Rule(
        "M076", "error", "No control token in the names, descriptions and values of tools.", "remove or escape it", no_control_text_in_tools
    ),
)
# With tokenize_rendered these texts stay text, so that a server may let them pass.
KEPT_AS_TEXT = frozenset(("M055", "M056", "M057", "M076", "M091"))
