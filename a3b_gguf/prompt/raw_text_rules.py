"""Rules over what stands inside and between the turns of a rendered prompt: think blocks, calls, results, characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from a3b_gguf.prompt.characters import C0, INVISIBLE, SURROGATE, hidden_tags
from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.raw_parse import json_call, xml_call
from a3b_gguf.prompt.raw_view import RawView, Turn
from a3b_gguf.prompt.view import shown

THINK = re.compile(r"</?think>")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_TAG = re.compile(r"</?tool_call>")
RESULT_TAG = re.compile(r"</?tool_response>")
TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
BOS = ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "</s>", "<|end_of_text|>")
VISION = re.compile(r"<\|vision_start\|>|<\|vision_end\|>|<\|image_pad\|>|<\|video_pad\|>")


def hit_at(view: RawView, at: int, message: str, fix: str = "", severity: str | None = None) -> Hit:
    where, offset = view.place(at)
    return Hit(where, message, fix, severity, offset)  # type: ignore[arg-type]


def _bodies(view: RawView) -> Iterator[Turn]:
    """Turns with a text of their own; not the opener of the answer, which other rules read."""
    yield from view.closed_turns


def think_tags_are_balanced(view: RawView) -> Iterator[Hit]:
    for turn in _bodies(view):
        found = list(THINK.finditer(turn.body))
        if found and turn.role != "assistant" and not (turn.role == "system" and TOOLS.search(turn.body)):
            yield hit_at(view, turn.body_start + found[0].start(), f"{found[0][0]} in a turn of {shown(turn.header)}")
        elif turn.role == "assistant":
            tags = [match[0] for match in found]
            if tags not in ([], ["<think>", "</think>"]):
                what = (
                    "a think block that is not closed" if tags.count("<think>") > tags.count("</think>") else "think tags that do not pair"
                )
                yield hit_at(view, turn.body_start + found[0].start(), f"{what} in an answer")


def calls_fit_the_style(view: RawView) -> Iterator[Hit]:
    for turn in _bodies(view):
        if turn.role != "assistant" or "tool_call>" not in turn.body:
            continue
        after_thought = turn.body.rfind("</think>") + 1
        found = list(CALL.finditer(turn.body, after_thought))
        if len(CALL_TAG.findall(turn.body, after_thought)) != 2 * len(found):
            at = turn.body.find("tool_call>", after_thought)
            yield hit_at(view, turn.body_start + max(at, 0), "tags of tool calls that do not pair")
            continue
        if not found:  # the tags stand in the thought
            continue
        for match in found:
            yield from _call_hits(view, turn.body_start + match.start(), match[1])
        if turn.body[found[-1].end() :].strip():
            yield hit_at(view, turn.body_start + found[-1].end(), "text behind the last call of an answer")


def _call_hits(view: RawView, at: int, inner: str) -> Iterator[Hit]:
    style = view.profile.call_style
    is_json = inner.lstrip().startswith("{")
    if style == "none":
        yield hit_at(view, at, f"the template of {view.profile.name} writes no tool calls", "", "warning")
    elif is_json != (style == "json"):
        yield hit_at(view, at, f"a call in {'JSON' if is_json else 'XML'}, this template writes {style.upper()}")
    elif (json_call(inner) if is_json else xml_call(inner)) is None:
        yield hit_at(view, at, "a call that cannot be read")


def results_have_a_place(view: RawView) -> Iterator[Hit]:
    called = False
    for turn in _bodies(view):
        tags = [match[0] for match in RESULT_TAG.finditer(turn.body)]
        at = turn.body_start + max(turn.body.find("tool_response>"), 0)
        if tags and turn.role == "user":
            if tags != ["<tool_response>", "</tool_response>"] * (len(tags) // 2):
                yield hit_at(view, at, "tags of tool results that do not pair")
            elif not called and _is_result(turn.body):
                yield hit_at(view, at, "a tool's result that follows no call")
        elif tags and turn.role == "assistant":
            yield hit_at(view, at, f"{tags[0]} in an answer: results stand in a user turn")
        called = turn.role == "assistant" and "<tool_call>" in turn.body
    for gap_at, gap in _gaps(view):
        if "tool_response>" in gap:
            yield hit_at(view, gap_at, "a tool's result outside of a turn", "open a user turn for it")


def _is_result(body: str) -> bool:
    return body.strip().startswith("<tool_response>")


def _gaps(view: RawView) -> Iterator[tuple[int, str]]:
    """What stands outside of turns."""
    at = 0
    for turn in view.turns:
        if turn.start > at:
            yield at, view.text[at : turn.start]
        at = turn.after
    if at < len(view.text):
        yield at, view.text[at:]


def tools_block_parses(view: RawView) -> Iterator[Hit]:
    for turn in _bodies(view):
        match = TOOLS.search(turn.body) if turn.role == "system" else None
        if not match or match[1].startswith("<function>"):
            continue
        at = turn.body_start + match.start(1)
        for line in match[1].split("\n"):
            try:
                json.loads(line)
            except ValueError as error:
                yield hit_at(view, at, f"a line of the tools block is no JSON: {error}")
                break
            except RecursionError:
                yield hit_at(view, at, "a line of the tools block is nested too deeply")
                break
            at += len(line) + 1


def no_bos_text(view: RawView) -> Iterator[Hit]:
    for word in BOS:
        at = view.text.find(word)
        if at >= 0:
            in_body = view.is_in_body(at)
            grave = not in_body or word in view.profile.controls
            yield hit_at(view, at, f"{word} begins or ends a text of other models", "", None if grave else "warning")


def scaffold_has_no_cr(view: RawView) -> Iterator[Hit]:
    places = [match.start() for match in re.finditer("\r", view.text) if not view.is_in_body(match.start())]
    if places:
        more = f", and {len(places) - 1} more" if len(places) > 1 else ""
        yield hit_at(view, places[0], f"a carriage return outside of the texts{more}")


def is_clean_text(view: RawView) -> Iterator[Hit]:
    found = SURROGATE.search(view.text) or re.search("\0", view.text)
    if found:
        what = "NUL" if found[0] == "\0" else f"unpaired surrogate U+{ord(found[0]):04X}"
        yield hit_at(view, found.start(), what)
        return
    control = C0.search(view.text)
    if control and control[0] != "\r":
        yield hit_at(view, control.start(), f"control character U+{ord(control[0]):04X}", "", "warning")


def nothing_invisible(view: RawView) -> Iterator[Hit]:
    if view.text.isascii():
        return
    tags = hidden_tags(view.text)
    if tags:
        yield hit_at(view, tags.start(), f"{len(tags[0])} tag characters: text that a person does not see")
    first = view.turns[0].start if view.turns else 0  # what stands before it is R001's
    outside = next((match for match in INVISIBLE.finditer(view.text, first) if not view.is_in_body(match.start())), None)
    inside = next((match for match in INVISIBLE.finditer(view.text, first) if match[0] < "\U000e0000"), None)
    if outside:
        yield hit_at(view, outside.start(), f"invisible character U+{ord(outside[0]):04X} outside of the texts")
    elif inside:
        yield hit_at(view, inside.start(), f"invisible character U+{ord(inside[0]):04X}", "", "warning")


def vision_is_balanced(view: RawView) -> Iterator[Hit]:
    for turn in view.turns:
        tags = [match for match in VISION.finditer(turn.body)]
        if not tags:
            continue
        names = [match[0].strip("<|>") for match in tags]
        whole = [names[index : index + 3] for index in range(0, len(names), 3)]
        if any(three not in (["vision_start", pad, "vision_end"] for pad in ("image_pad", "video_pad")) for three in whole):
            yield hit_at(view, turn.body_start + tags[0].start(), "placeholders of images or videos that do not pair")


def is_templated_once(view: RawView) -> Iterator[Hit]:
    for turn, following in zip(view.turns, view.turns[1:], strict=False):
        nested = turn.role == "user" and not turn.closed and not turn.body.strip() and following.role in ("system", "user")
        if nested:
            yield hit_at(view, turn.start, "a whole prompt inside a user turn: it was rendered twice")


RAW_TEXT_RULES: tuple[Rule[RawView], ...] = (
    Rule("R016", "error", "Think tags pair, in answers only.", "close the block, or move it into an answer", think_tags_are_balanced),
    Rule(
        "R017",
        "error",
        "Calls in the history are written in the template's style and can be read.",
        "render the messages again with the model's template",
        calls_fit_the_style,
    ),
    Rule(
        "R018",
        "error",
        "Results stand in user turns after an answer with calls, their tags pair.",
        "put it behind the call, or remove it",
        results_have_a_place,
    ),
    Rule("R019", "warning", "The tools block holds one JSON object a line.", "render the tools again", tools_block_parses),
    Rule(
        "R020",
        "error",
        "No BOS or EOS text; in a turn's text, where this model has no such token, a warning.",
        "remove it: the engine adds what the model needs",
        no_bos_text,
    ),
    Rule("R021", "error", "No carriage returns outside of the texts.", "write \\n", scaffold_has_no_cr),
    Rule(
        "R022", "error", "UTF-8 text without NUL or surrogates; other control characters are a warning.", "remove it", is_clean_text
    ),
    Rule("R023", "error", "Nothing invisible outside of the texts; inside a warning.", "remove it", nothing_invisible),
    Rule("R027", "error", "Placeholders of images and videos pair.", "write <|vision_start|>, the pad, <|vision_end|>", vision_is_balanced),
    Rule(
        "R028", "warning", "A prompt is rendered once.", "send messages to a chat endpoint, or this prompt to a completion endpoint",
        is_templated_once,
    ),
)  # fmt: skip
