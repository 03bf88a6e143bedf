"""Rules over the options that a request hands to the template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from a3b_gguf.prompt.findings import Hit, Rule
from a3b_gguf.prompt.view import RequestView, kind, shown, step
from a3b_gguf.template import RESERVED

OPTIONS = "chat_template_kwargs"


def thinking_is_boolean(view: RequestView) -> Iterator[Hit]:
    options = view.request.get(OPTIONS)
    if options is not None and not isinstance(options, Mapping):
        yield Hit(OPTIONS, f"{OPTIONS} is {kind(options)}, expected an object", "send an object")
    if not isinstance(view.options.get("enable_thinking", True), bool):
        found = view.options["enable_thinking"]
        yield Hit(f"{OPTIONS}.enable_thinking", f"enable_thinking is {kind(found)}; everything but false itself leaves thinking on")


def options_are_read(view: RequestView) -> Iterator[Hit]:
    known = view.profile.variables
    if known is None:
        return
    for key in view.options:
        if key not in known and key not in RESERVED:
            what = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
            yield Hit(f"{OPTIONS}{step(key)}", f"the template of {view.profile.name} does not read {shown(str(key))}; {what}")


def effort_is_known(view: RequestView) -> Iterator[Hit]:
    found = view.options.get("reasoning_effort")
    if view.profile.efforts and found is not None and found not in view.profile.efforts:
        fix = "send 'xhigh'" if found == "high" and "xhigh" in view.profile.efforts else ""
        message = f"reasoning_effort {shown(str(found))} is refused by the template; it takes {', '.join(view.profile.efforts)}"
        yield Hit(f"{OPTIONS}.reasoning_effort", message, fix)


def options_are_the_callers(view: RequestView) -> Iterator[Hit]:
    for key in view.options:
        if key in RESERVED:
            message = f"the option {key!r} would replace what the renderer itself hands to the template"
            yield Hit(f"{OPTIONS}{step(key)}", message)


def kept_thinking_is_there(view: RequestView) -> Iterator[Hit]:
    if view.options.get("preserve_thinking") is not True or view.profile.preserve == "never":
        return
    for entry in view.of_role("assistant"):
        if not entry.message.get("reasoning_content") and "</think>" not in (entry.text or ""):
            yield Hit(entry.where, "preserve_thinking without reasoning_content: the template writes an empty think block here")


def thinking_can_be_switched(view: RequestView) -> Iterator[Hit]:
    if view.profile.always_thinks and view.options.get("enable_thinking") is False:
        yield Hit(f"{OPTIONS}.enable_thinking", f"{view.profile.name} always thinks: its template has no way to turn it off")


OPTION_RULES: tuple[Rule[RequestView], ...] = (
    Rule(
        "M100",
        "error",
        "`chat_template_kwargs` is an object and its `enable_thinking` true or false.",
        "send true or false",
        thinking_is_boolean,
    ),
    Rule("M101", "warning", "Options are ones that the template reads.", "remove it", options_are_read),
    Rule("M102", "error", "`reasoning_effort` is a value that the template takes.", "send one of those", effort_is_known),
    Rule("M103", "error", "`chat_template_kwargs` replaces nothing that belongs to the renderer.", "remove it", options_are_the_callers),
    Rule(
        "M104",
        "warning",
        "With `preserve_thinking` each answer is sent with its reasoning.",
        "send reasoning_content as it was received, or preserve_thinking: false",
        kept_thinking_is_there,
    ),
    Rule("M105", "error", "Thinking is not turned off where it cannot be.", "use another model", thinking_can_be_switched),
)
