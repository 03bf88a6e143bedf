"""A profile found by rendering small conversations, so that a patched template is judged by what it does, not by its name."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from a3b_gguf.prompt.battery import ANSWER, NAME, NEXT, SYSTEM, THOUGHT, USER, VALUE, Probes, probe
from a3b_gguf.prompt.profiles import PROFILES, CallStyle, Preserve, Profile, ToolsPlace
from a3b_gguf.template import BadTemplate, Template, known_name

START, END = "<|im_start|>", "<|im_end|>"
MARK = re.compile(r"<\|[A-Za-z0-9_]+\|>|<start_of_turn>|<｜[^｜]+｜>|\[INST\]")
# What find_undeclared_variables reports although the template sets it, in a branch.
LOCALS = frozenset(("content", "reasoning_content", "loop_messages", "system_message"))


def profile_of_template(template: Template, name: str, controls: tuple[str, ...]) -> Profile:
    """How `template` speaks to its model. controls: the vocabulary's own. Raises BadTemplate when it cannot render even a question.

    A template that ships with a3b, to the last byte, is not rendered: its profile is the shipped one, which tests hold equal.
    """
    shipped = PROFILES.get(known_name(template.text) or "")
    return replace(shipped, name=name, controls=controls) if shipped else profile_of_probes(probes_of(template), template, name, controls)


def probes_of(template: Template) -> Probes:
    """The outcomes of the battery, remembered per template text: they do not depend on anything else but BOS and EOS."""
    return _probed(_ByText(template))


class _ByText:
    """Makes two templates with one text equal, for the cache."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._key = (template.text, getattr(template, "bos_token", ""), getattr(template, "eos_token", ""))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByText) and self._key == other._key


@lru_cache(maxsize=16)
def _probed(key: _ByText) -> Probes:
    return probe(key.template)


def profile_of_probes(probes: Probes, template: Template, name: str, controls: tuple[str, ...]) -> Profile:
    """The profile that the outcomes show. Raises BadTemplate when there is no question in them."""
    if probes.bad is not None:
        raise BadTemplate(f"the chat template of {name}: {probes.bad.message}", probes.bad.hint)
    if USER not in probes.text("user"):
        raise BadTemplate(
            f"the chat template of {name} does not render a user message", "convert the model again with the template of its checkpoint"
        )
    start, end = _turn_marks(probes)
    return Profile(
        name=name,
        generation_on=_generation(probes, "on"),
        generation_off=_generation(probes, "off"),
        controls=controls,
        turn_start=start,
        turn_end=end,
        strict_system=not probes.renders("late system"),
        list_content=probes.text("one part") == probes.text("user"),
        call_style=_call_style(probes),
        turn_starts=_turn_starts(probes),
        tools_place=_tools_place(probes),
        preserve=_preserve(probes),
        efforts=_efforts(probes),
        variables=template.variables - LOCALS,
    )


def _turn_marks(probes: Probes) -> tuple[str, str]:
    """The strings around a turn when two of them are written as ChatML or Phi-3 writes them, else two empty strings."""
    two = probes.text("turns")
    chatml = f"{START}user\n{USER}{END}\n{START}assistant\n" in two and two.endswith(f"{END}\n{START}user\n{NEXT}{END}\n")
    if chatml:
        return START, END
    pipes = f"<|user|>\n{USER}<|end|>\n<|assistant|>\n" in two and f"<|end|>\n<|user|>\n{NEXT}<|end|>\n" in two
    return "", "<|end|>" if pipes else ""


def _turn_starts(probes: Probes) -> tuple[str, ...]:
    """The last mark before the text of each role."""
    found = []
    for chat, text in (("system", SYSTEM), ("system", USER), ("turns", ANSWER)):
        before = MARK.findall(probes.text(chat).partition(text)[0])
        if before:
            found.append(before[-1])
    if found and all(mark == found[0] for mark in found):
        return (found[0],)
    return tuple(dict.fromkeys(found))


def _generation(probes: Probes, thinking: str) -> str:
    """What the template appends when it is asked to open the answer."""
    without, with_it = probes.text(thinking), probes.text(f"opened {thinking}")
    return with_it.removeprefix(without) if with_it.startswith(without) else ""


def _call_style(probes: Probes) -> CallStyle:
    text = probes.text("call")
    if f"<function={NAME}>" in text and VALUE in text:
        return "xml"
    return "json" if f'"name": "{NAME}"' in text and VALUE in text else "none"


def _tools_place(probes: Probes) -> ToolsPlace:
    text = probes.text("tools")
    if NAME not in text:
        return "none"
    return "before" if text.index(NAME) < text.find(SYSTEM) else "after"


def _preserve(probes: Probes) -> Preserve:
    if THOUGHT in probes.text("thought"):
        return "always"
    return "on request" if THOUGHT in probes.text("thought kept") else "never"


def _efforts(probes: Probes) -> tuple[str, ...]:
    """Values that are taken, where an unknown one is refused."""
    if probes.renders("effort none such"):
        return ()
    return tuple(word for word in ("low", "medium", "high", "xhigh") if probes.renders(f"effort {word}"))
