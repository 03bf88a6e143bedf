"""Every delimiter of good prompts broken in every way, and whatever else may come: found, or proved to be what the template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a3b_gguf.errors import A3BError
from a3b_gguf.prompt import PROFILES, apply, fix_request, refused, render_request, verify_body, verify_raw, verify_request
from a3b_gguf.prompt.battery import probe
from a3b_gguf.prompt.fix_raw import fix_raw
from a3b_gguf.prompt.probes import profile_of_probes
from a3b_gguf.prompt.template_rules import TEMPLATE_RULES, TemplateView
from a3b_gguf.template import BadTemplate, ChatTemplate
from chats import conversations
from conversations import GOOD, OFF, QWEN36, TOOL_TURNS
from templates import template_text
from test_prompt import JSON, PIECES, REQUEST

TEMPLATE = ChatTemplate(template_text("qwen3.6"))
DELIMITER = re.compile(r"<\|im_start\|>[a-z]+\n|<\|im_end\|>\n|</?think>\n|</?tool_call>\n?|</?tool_response>|</?function|</?parameter")


def good_prompts(count: int) -> list[str]:
    prompts = [GOOD, OFF, TOOL_TURNS]
    for chat in conversations(11, 400):
        prompt = render_request(TEMPLATE, chat)
        if len(prompt) < 3500 and not re.search(r"<IMPORTANT>", prompt) and prompt not in prompts:
            prompts.append(prompt)
    return prompts[:count]


def mutants(prompt: str, every: int = 1) -> Iterator[str]:
    """Each delimiter left out, doubled, each of its characters left out, doubled and replaced; every `every`-th of them."""
    edits = []
    for match in DELIMITER.finditer(prompt):
        start, stop = match.span()
        edits += [(start, stop, ""), (start, stop, match[0] * 2), (start, stop, match[0].upper()), (start, stop, " " + match[0])]
        edits += [(at, at + 1, new) for at in range(start, stop) for new in ("", prompt[at] * 2, "x", " ", "\r")]
    for start, stop, new in edits[::every]:
        yield prompt[:start] + new + prompt[stop:]


def survivors(prompts: list[str], every: int) -> list[str]:
    """Mutants that pass although it is not proved that the template writes them."""
    found = []
    for prompt in prompts:
        for mutant in mutants(prompt, every):
            findings = verify_raw(mutant, QWEN36, template=TEMPLATE)
            if not refused(findings) and (mutant == prompt or any(finding.rule == "R025" for finding in findings)):
                found += [mutant] if mutant != prompt else []
    return found


def test_the_prompts_are_good() -> None:
    prompts = good_prompts(20)
    assert len(prompts) == 20
    assert all(not refused(verify_raw(prompt, QWEN36, template=TEMPLATE)) for prompt in prompts)


def test_mutations_of_good_prompts() -> None:
    assert survivors(good_prompts(20), every=29) == []


@pytest.mark.prove
def test_every_mutation_of_good_prompts() -> None:
    assert survivors(good_prompts(20), every=1) == []


# -- whatever comes --------------------------------------------------------------------------------------------------------------------

RAW = st.lists(
    PIECES | st.sampled_from(["<tool_call>\n", "</tool_call>", "<tool_response>\n", "<tools>\n{", "\n</tools>", "\r", "\0"]), max_size=14
)
BROKEN = st.sampled_from([
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0].content }}", "<|im_start|>", "{{ m.role }}", "\n",
    "<|im_end|>\n",
    "{% if add_generation_prompt %}", "{% endif %}", "{{ raise_exception('x') }}", "{{ tools | tojson }}", "{{ x.y.z }}", "{{ [][5] }}",
    "{{ 'x' * 3 }}", "{{ m.content | trim }}", "{% set x = namespace(a=1) %}", "{{ enable_thinking }}", "<think>", "{# c #}", "{{ 1 / 0 }}",
])  # fmt: skip


def any_request(value: Any) -> None:
    """Findings that can be shown, a mending that ends, and what passes renders or is refused in the template's words."""
    for profile in (QWEN36, PROFILES["qwen3"]):
        findings = verify_request(value, profile, template=TEMPLATE if profile is QWEN36 else None)
        assert all(finding.where and finding.message and finding.fix for finding in findings)
    fixed = fix_request(value, QWEN36, lambda request: verify_request(request, QWEN36))
    assert refused(fixed.left) or not refused(verify_request(fixed.value, QWEN36))


def any_bytes(data: bytes) -> None:
    value, findings = verify_body(data)
    assert value is None or not refused(findings)


def any_raw(pieces: list[str]) -> None:
    text = "".join(pieces)
    findings = verify_raw(text, QWEN36, template=TEMPLATE)
    assert all(finding.where and finding.message and finding.fix for finding in findings)
    fixed = fix_raw(text, QWEN36, lambda value: verify_raw(value, QWEN36))
    assert not refused(fixed.left) or refused(verify_raw(fixed.value, QWEN36))


def any_template(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        template = ChatTemplate(text)
    except BadTemplate as error:
        assert list(apply(TEMPLATE_RULES, TemplateView(text, error.message)))
        return
    probes = probe(template)
    try:
        profile = profile_of_probes(probes, template, "any", ())
    except A3BError:
        profile = None
    assert list(apply(TEMPLATE_RULES, TemplateView(text, "", template, probes, profile)))


VALUES = REQUEST | st.dictionaries(st.sampled_from(["messages", "tools", "chat_template_kwargs", "tool_choice"]), JSON, max_size=4)
ANY: dict[str, tuple[Callable[[Any], None], Any, int, int]] = {  # what runs, on what, how often in a test, how often in a proof
    "requests": (any_request, VALUES, 150, 20_000),
    "bytes": (any_bytes, st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()), 200, 10_000),
    "raw prompts": (any_raw, RAW, 200, 12_000),
    "templates": (any_template, st.lists(BROKEN, min_size=1, max_size=8), 60, 8_000),
}


def run(name: str, count: int) -> None:
    function, strategy, _, _ = ANY[name]
    decorate: Any = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    with_values: Any = given(strategy)
    decorate(with_values(function))()


@pytest.mark.parametrize("name", ANY)
def test_anything(name: str) -> None:
    run(name, ANY[name][2])


@pytest.mark.parametrize(
    "pieces",
    [
        ["<|im_start|>", "assistant", "<tool_call>\n", "<tool_call>\n", "</think>\n\n", "<|im_start|>"],
        ["<|im_start|>assistant\n<think>\nA <tool_call> is a call.\n</think>\n\nYes.<|im_end|>\n"],
    ],
)
def test_raw_prompts_that_were_found_by_chance(pieces: list[str]) -> None:
    any_raw(pieces)


@pytest.mark.prove
@pytest.mark.parametrize("name", ANY)
def test_anything_50_000_times(name: str) -> None:
    run(name, ANY[name][3])
