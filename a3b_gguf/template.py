"""A model's own chat template: untrusted code from the file, rendered in jinja2's immutable sandbox.

The environment is the one that Hugging Face templates are written for (transformers, utils/chat_template_utils.py,
`_compile_jinja_template`): trimmed blocks, loop controls, `tojson` that keeps non-ASCII text, `raise_exception`,
`strftime_now`, `{% generation %}`. jinja2 is imported only when a template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from a3b_gguf.errors import AnswerIsNo, BadInput

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# What the renderer itself hands to a template; a request's options may not replace any of it.
RESERVED = frozenset((
    "messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now", "range", "dict", "namespace",
))  # fmt: skip
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
MAX_TEMPLATE_CHARS = 256 << 10
THINK, END_THINK = "<think>", "</think>"
TURN_START = "<|im_start|>"


class BadTemplate(BadInput):
    """The template itself is wrong: its syntax, or it reaches for what the sandbox forbids."""


class TemplateRefused(AnswerIsNo):
    """The template will not render these messages. The message holds the template's own words: a server answers 400."""


class ChatTemplate:
    """A compiled template. Raises BadTemplate when `text` is not one.

    bos_token, eos_token: the texts of the model's own tokens, for templates that write them.
    """

    def __init__(self, text: str, bos_token: str = "", eos_token: str = "") -> None:
        from jinja2 import TemplateSyntaxError, meta

        if len(text) > MAX_TEMPLATE_CHARS:
            raise BadTemplate(f"the chat template has {len(text):,} characters, at most {MAX_TEMPLATE_CHARS:,} are read")
        self.text = text
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _environment()
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise BadTemplate(f"the chat template has a syntax error in line {error.lineno}: {error.message}", FIX_TEMPLATE) from error
        except RecursionError as error:
            raise BadTemplate("the chat template is nested too deeply", FIX_TEMPLATE) from error
        self.variables: frozenset[str] = frozenset(meta.find_undeclared_variables(tree)) - RESERVED
        """Names that the template reads and does not set itself: the options that can have an effect, among a few locals."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> str:
        """The prompt, as text. options: further variables, such as `enable_thinking` (chat_template_kwargs of a request).

        Raises TemplateRefused when the template raises or fails on these messages, BadTemplate when it leaves its sandbox.
        """
        from jinja2.exceptions import SecurityError

        taken = sorted(RESERVED & options.keys())
        if taken:
            raise TemplateRefused(f"template option {taken[0]} is not the caller's to set", "remove it")
        try:
            return self._template.render(
                {**options, **self._tokens, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            )
        except _Raised as error:
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from error
        except SecurityError as error:
            raise BadTemplate(f"the chat template does what its sandbox forbids: {error}", FIX_TEMPLATE) from error
        except Exception as error:  # a template is a program: on input that it does not expect it can fail in any way
            raise TemplateRefused(f"the model's chat template fails on these messages: {type(error).__name__}: {error}") from error


FIX_TEMPLATE = "do not use this file's template: convert the model again from a source that you trust"


def ends_in_thinking(prompt: str) -> bool:
    """Whether the model goes on inside an open `<think>` after this prompt, so that its output starts as reasoning."""
    turn = prompt[max(prompt.rfind(TURN_START), 0) :]
    return turn.rfind(THINK) > turn.rfind(END_THINK)


class _Raised(Exception):
    """A template called raise_exception."""


def _raise(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; rendering is not changed by it."""

        tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment
