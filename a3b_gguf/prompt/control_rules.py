"""Rules against text that would become a control token: what a user writes must stay text.

llama.cpp turns CONTROL and USER_DEFINED token texts into tokens wherever they occur in a prompt; even with parse_special off
the USER_DEFINED ones (llama-vocab.cpp, tokenizer_st_partition).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import Entry, Path, RequestView, path_text, shown, strings
from a3b_gguf.strict_json import NotJSON, loads

THINK_TAGS = ("<think>", "</think>")


def no_control_text(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        if entry.text is not None:
            allowed = THINK_TAGS if entry.role == "assistant" else ()  # M056 speaks about those
            yield from _control_hits(view, (None, f"{entry.where}.content"), entry.text, allowed)
        for path, text in _other_texts(entry):
            yield from _control_hits(view, path, text)


def no_control_text_in_tools(view: RequestView) -> Iterator[Hit]:
    for path, text in strings(view.request.get("tools"), "tools"):
        yield from _control_hits(view, path, text)


def no_inline_thinking(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("assistant"):
        for tag in THINK_TAGS:
            if tag in (entry.text or ""):
                yield Hit(f"{entry.where}.content", f"{tag} in an assistant's text: templates cut the text there")
                break


def _other_texts(entry: Entry) -> Iterator[tuple[Path, str]]:
    """Every string of a message but its role and content, arguments also as what they parse to."""
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


def _control_hits(view: RequestView, path: Path, text: str, allowed: tuple[str, ...] = ()) -> Iterator[Hit]:
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
        )


CONTROL_RULES: tuple[Rule[RequestView], ...] = (
    Rule("M055", "error", "No text in a message that the vocabulary turns into a control token.", "remove or escape it", no_control_text),
    Rule(
        "M056",
        "warning",
        "No `<think>` or `</think>` in an assistant's content (elsewhere M055 speaks).",
        "send it as reasoning_content",
        no_inline_thinking,
    ),
    Rule(
        "M076", "error", "No control token in the names, descriptions and values of tools.", "remove or escape it", no_control_text_in_tools
    ),
)
