"""Rules over tool calls in the history and over their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.schema import violations
from a3b_gguf.prompt.tool_rules import functions
from a3b_gguf.prompt.view import Entry, Path, RequestView, kind, path_text, shown, strings
from a3b_gguf.strict_json import NotJSON, loads

CLOSERS = ("\n</parameter>", "</function>", "</tool_call>")


def calls_are_a_list(view: RequestView) -> Iterator[Hit]:
    for entry in view.entries:
        found = entry.message.get("tool_calls")
        where = f"{entry.where}.tool_calls"
        if found is None:
            continue
        if not isinstance(found, list) or not found:
            what = kind(found) if found != [] else "an empty list"
            yield Hit(where, f"tool_calls is {what}, expected a list of calls; templates drop anything else")
        elif entry.role != "assistant":
            yield Hit(where, f"tool_calls on a {entry.title} message")


def calls_are_whole(view: RequestView) -> Iterator[Hit]:
    for where, call in _calls(view):
        if not isinstance(call, Mapping):
            yield Hit(where, f"a call is {kind(call)}, expected an object")
            continue
        if not isinstance(call.get("id"), str) or not call["id"]:
            yield Hit(f"{where}.id", "the call has no id")
        if call.get("type") != "function":
            yield Hit(f"{where}.type", "the call's type is not 'function'")
        if not _name(call):
            yield Hit(f"{where}.function.name", "the call names no function")


def arguments_are_an_object(view: RequestView) -> Iterator[Hit]:
    for where, call in _calls(view):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        found, path = function.get("arguments"), f"{where}.function.arguments"
        if isinstance(found, str):
            try:
                value = loads(found)
            except NotJSON as error:
                at = f" at character {error.at}" if error.at >= 0 else ""
                yield Hit(path, f"arguments {shown(found)} are not JSON: {error}{at}", at=max(error.at, 0))
                continue
            if not isinstance(value, Mapping):
                yield Hit(path, f"arguments hold {kind(value)}, expected an object")
        elif not isinstance(found, Mapping):
            what = kind(found) if "arguments" in function else "missing"
            yield Hit(path, f"arguments are {what}, expected an object or a string that holds one")


def _calls(view: RequestView) -> Iterator[tuple[str, Any]]:
    for entry in view.entries:
        for index, call in enumerate(entry.calls):
            yield f"{entry.where}.tool_calls[{index}]", call


def _name(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function.get("name") if isinstance(function, Mapping) else None
    return found if isinstance(found, str) else ""


def _id(call: Any) -> str:
    found = call.get("id") if isinstance(call, Mapping) else None
    return found if isinstance(found, str) else ""


def _arguments(call: Any) -> Mapping[str, Any] | None:
    """The arguments as an object, None when they are none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(found, str):
        try:
            found = loads(found)
        except NotJSON:  # M082 reports it
            return None
    return found if isinstance(found, Mapping) else None


def ids_are_distinct(view: RequestView) -> Iterator[Hit]:
    seen: dict[str, str] = {}
    for where, call in _calls(view):
        found = _id(call)
        if found and found in seen:
            yield Hit(f"{where}.id", f"the id {shown(found)} was used before, at {seen[found]}")
        elif found:
            seen[found] = where


def results_follow_calls(view: RequestView) -> Iterator[Hit]:
    open_calls = False
    for entry in view.entries:
        if entry.role != "tool":
            open_calls = entry.role == "assistant" and bool(entry.calls)
        elif not open_calls:
            yield Hit(entry.where, "a tool's result that follows no call; templates write it into a turn that was never opened")


Round = tuple[Entry, list[Entry]]  # a message with calls, and the results right behind it


def _rounds(view: RequestView) -> Iterator[Round]:
    current: Round | None = None
    for entry in view.entries:
        if entry.role == "tool":
            if current is not None:
                current[1].append(entry)
            continue
        if current is not None:
            yield current
        current = (entry, []) if entry.role == "assistant" and entry.calls else None
    if current is not None:
        yield current


def results_name_their_call(view: RequestView) -> Iterator[Hit]:
    for caller, results in _rounds(view):
        known = [_id(call) for call in caller.calls]
        for entry in results:
            found = entry.message.get("tool_call_id")
            where = f"{entry.where}.tool_call_id"
            if not isinstance(found, str) or not found:
                yield Hit(where, "the result does not say which call it answers")
            elif found not in known and all(known):
                yield Hit(where, f"no call of {caller.where} has the id {shown(found)}")


def calls_are_answered(view: RequestView) -> Iterator[Hit]:
    for caller, results in _rounds(view):
        if caller.index + len(results) == len(view.messages) - 1 and not results:
            continue  # the conversation ends with the call: M044 speaks
        answered = {entry.message.get("tool_call_id") for entry in results if isinstance(entry.message.get("tool_call_id"), str)}
        for index, call in enumerate(caller.calls):
            if _id(call) and _id(call) not in answered and len(results) < len(caller.calls):
                yield Hit(f"{caller.where}.tool_calls[{index}]", f"the call {shown(_id(call))} has no result before the next message")


def results_keep_order(view: RequestView) -> Iterator[Hit]:
    for caller, results in _rounds(view):
        order = {_id(call): index for index, call in enumerate(caller.calls)}
        found = [order[entry.message["tool_call_id"]] for entry in results if _is_in(entry.message.get("tool_call_id"), order)]
        late = next((index for index in range(1, len(found)) if found[index] < found[index - 1]), None)
        if late is not None:
            yield Hit(results[late].where, "results are not in the order of their calls; templates drop the ids, so that order is all")


def _is_in(value: Any, known: Mapping[str, int]) -> bool:
    return isinstance(value, str) and value in known


def one_result_a_call(view: RequestView) -> Iterator[Hit]:
    for caller, results in _rounds(view):
        known = {_id(call) for call in caller.calls}
        seen: Counter[str] = Counter()
        for entry in results:
            found = entry.message.get("tool_call_id")
            if isinstance(found, str) and found in known:
                seen[found] += 1
                if seen[found] > 1:
                    yield Hit(entry.where, f"a second result for the call {shown(found)}")


def calls_name_tools(view: RequestView) -> Iterator[Hit]:
    names = {function.get("name") for _, function in functions(view) if isinstance(function.get("name"), str)}
    for where, call in _calls(view) if names else ():
        if _name(call) and _name(call) not in names:
            yield Hit(f"{where}.function.name", f"{shown(_name(call))} is not among `tools`")


def arguments_keep_the_schema(view: RequestView) -> Iterator[Hit]:
    schemas = {function["name"]: function.get("parameters") for _, function in functions(view) if isinstance(function.get("name"), str)}
    for where, call in _calls(view) if schemas else ():
        arguments = _arguments(call)
        if arguments is not None and _name(call) in schemas:
            for path, problem in violations(arguments, schemas[_name(call)]):
                yield Hit(f"{where}.function.arguments", f"{path.removeprefix('.') or 'the arguments'}: {problem}")


def results_do_not_close(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("tool"):
        if "</tool_response>" in (entry.text or ""):
            message = "</tool_response> in a result would end it, and what follows would be the user's"
            yield Hit(f"{entry.where}.content", message, at=(entry.text or "").index("</tool_response>"))


def arguments_can_be_carried(view: RequestView) -> Iterator[Hit]:
    for where, call in _calls(view) if view.profile.call_style == "xml" else ():
        path: Path
        for path, text in strings(_arguments(call) or {}, f"{where}.function.arguments"):
            found = next((closer for closer in CLOSERS if closer in text), None)
            if found:
                yield Hit(path_text(path), f"{found.strip()} in a value: this template's form of calls has no way to escape it")
                break


def calls_are_calls(view: RequestView) -> Iterator[Hit]:
    for entry in view.of_role("assistant"):
        if "<tool_call>" in (entry.text or ""):
            message = "a <tool_call> as text in an assistant's message: its result cannot be matched with it"
            yield Hit(f"{entry.where}.content", message, at=(entry.text or "").index("<tool_call>"))


CALL_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M080",
        "error",
        "`tool_calls` is a list with at least one call, on assistant messages only.",
        "send a list, or leave it out",
        calls_are_a_list,
    ),
    Rule("M081", "error", "A call has an id, type 'function' and a function's name.", "fill it in", calls_are_whole),
    Rule(
        "M082",
        "error",
        "A call's arguments are an object, or a string that parses to one.",
        "send a JSON object; {} if there are none",
        arguments_are_an_object,
    ),
    Rule("M083", "error", "Ids of calls are distinct.", "give each call an id of its own", ids_are_distinct),
    Rule(
        "M084",
        "error",
        "A tool's result follows an assistant's call, with only results between.",
        "put it after the call, or remove it",
        results_follow_calls,
    ),
    Rule("M085", "error", "A result names the call that it answers.", "send the call's id as tool_call_id", results_name_their_call),
    Rule("M086", "error", "Each call is answered before the next message.", "add its result", calls_are_answered),
    Rule("M087", "warning", "Results stand in the order of their calls.", "put them in order", results_keep_order),
    Rule("M088", "error", "A call has one result.", "drop the second", one_result_a_call),
    Rule("M089", "warning", "Calls name functions of `tools`.", "add the tool that was called", calls_name_tools),
    Rule("M090", "warning", "Arguments keep the schema of their tool.", "mend the call or the schema", arguments_keep_the_schema),
    Rule("M091", "error", "No `</tool_response>` in a result.", "escape it, such as '< /tool_response>'", results_do_not_close),
    Rule(
        "M092",
        "warning",
        "No `</parameter>`, `</function>` or `</tool_call>` in the values of a call that is written as XML.",
        "leave it; the model may read the call as shorter than it was",
        arguments_can_be_carried,
    ),
    Rule("M093", "warning", "Calls are sent as `tool_calls`, not as text.", "convert it to tool_calls", calls_are_calls),
)
