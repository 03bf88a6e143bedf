"""A template of unknown origin cannot hang, fill or leave the process that it is rendered for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from a3b_gguf.template import (
    KNOWN,
    BadTemplate,
    ChatTemplate,
    GuardedTemplate,
    Limits,
    TemplateRefused,
    known_name,
    open_template,
    template_sha256,
)
from templates import NAMES, template_text

U = {"role": "user", "content": "hi"}
QUICK = Limits(cpu_s=0.2, max_output_chars=100_000, memory_bytes=128 << 20)
ESCAPES = (
    "{% for x in ().__class__.__base__.__subclasses__() %}{% if 'warning' in x.__name__ %}{{x()._module.__builtins__['__import__']('os')"
    ".popen('touch /tmp/pwned')}}{% endif %}{% endfor %}",  # CVE-2024-34359
    "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",  # CVE-2026-5760
    "{{ (''|attr('__class__')).mro() }}",
    "{{ messages[0]['__class__'] }}",
    "{% if 'secret word' in messages[0].content %}{{ ''.__class__ }}{% endif %}ok",  # a branch that no probe takes
    "{% include '/etc/passwd' %}",
    "{% import 'x' as y %}",
)


@pytest.mark.parametrize("text", ESCAPES, ids=range(len(ESCAPES)))
def test_escapes_are_refused_before_anything_is_rendered(text: str) -> None:
    with pytest.raises(BadTemplate, match=r"leads out of its sandbox \(T005\)"):
        open_template(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x", "CPU time"),
        ("{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "writes more than 100,000 characters"),
        ("{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}", "too much memory"),
        ("{{ messages[0].content * (10 ** 10) }}", "too much memory"),
    ],
    ids=["time", "output", "memory", "string"],
)
def test_limits(text: str, words: str) -> None:
    template = open_template(text, limits=QUICK)
    with pytest.raises(BadTemplate, match=words):
        template.render([U])


def test_a_constant_that_is_folded_for_ever_is_ended_too() -> None:
    with pytest.raises(BadTemplate, match="CPU time|memory"):
        open_template("{{ 9 ** (9 ** 9) }}", limits=QUICK)


def test_after_a_kill_the_next_chat_is_answered_and_after_three_none() -> None:
    text = (
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    )
    template = open_template(text, limits=QUICK)
    for _ in range(3):
        with pytest.raises(BadTemplate, match="was ended"):
            template.render([{"role": "user", "content": "loop"}])
    with pytest.raises(BadTemplate, match="ended 3 times"):
        template.render([U])
    once = open_template(text, limits=QUICK)
    with pytest.raises(BadTemplate):
        once.render([{"role": "user", "content": "loop"}])
    assert once.render([U]) == "ok"


def test_refusals_and_options_are_those_of_the_template() -> None:
    template = open_template(
        "{{ raise_exception('Be polite.') if messages[0].content == 'No' }}{{ enable_thinking }}{{ messages[0].content }}"
    )
    assert template.variables == {"enable_thinking"}
    with pytest.raises(TemplateRefused, match="refuses these messages: Be polite"):
        template.render([{"role": "user", "content": "No"}])
    assert template.render([{"role": "user", "content": "\ud800 ü"}], options={"enable_thinking": False}) == "False\ud800 ü"
    with pytest.raises(TemplateRefused, match="messages"):
        template.render([U], options={"messages": []})


def test_threads_share_one_child() -> None:
    template = open_template("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: template.render([{"role": "user", "content": str(n)}]), range(64))) == [str(n) for n in range(64)]


def test_a_child_that_died_is_started_again() -> None:
    template = GuardedTemplate("{{ messages[0].content }}")
    assert template.render([U]) == "hi"
    child = template._child
    assert child is not None
    child.kill()
    child.wait()
    with pytest.raises(BadTemplate):
        template.render([U])
    assert template.render([U]) == "hi"
    template.close()


def test_known_templates_are_rendered_in_process() -> None:
    assert {known_name(template_text(name)) for name in NAMES} == set(KNOWN.values())
    assert all(KNOWN[template_sha256(template_text(name))] for name in NAMES)
    assert isinstance(open_template(template_text("qwen3.6")), ChatTemplate)
    assert isinstance(open_template(template_text("qwen3.6") + "\n"), GuardedTemplate)
