"""A chat template compiled in this process: code from a file, rendered in jinja2's immutable sandbox.

The sandbox keeps a template from reaching the machine, it does not bound its time or memory: see `guarded` for templates of unknown origin.

The environment is the one that Hugging Face templates are written for (transformers, utils/chat_template_utils.py,
`_compile_jinja_template`): trimmed blocks, loop controls, `tojson` that keeps non-ASCII text, `raise_exception`,
`strftime_now`, `{% generation %}`. jinja2 is imported only when a template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from a3b_gguf.template.scan import forbidden
from a3b_gguf.template.values import FIX_TEMPLATE, MAX_TEMPLATE_CHARS, NO_OPTIONS, RESERVED, BadTemplate, TemplateRefused

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment


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
        self.forbidden: tuple[tuple[int, str], ...] = tuple(forbidden(tree))
        """Line and name of what it must not reach for; `guarded.open_template` refuses such a template."""
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
        return "".join(self.pieces(messages, tools, add_generation_prompt, options))

    def pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> Iterator[str]:
        """The prompt piece by piece, for a reader that stops when it is too long. Raises as `render` does."""
        from jinja2.exceptions import SecurityError

        taken = sorted(RESERVED & options.keys())
        if taken:
            raise TemplateRefused(f"template option {taken[0]} is not the caller's to set", "remove it")
        try:
            yield from self._template.generate(
                {**options, **self._tokens, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            )
        except _Raised as error:
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from error
        except SecurityError as error:
            raise BadTemplate(f"the chat template does what its sandbox forbids: {error}", FIX_TEMPLATE) from error
        except Exception as error:  # a template is a program: on input that it does not expect it can fail in any way
            raise TemplateRefused(f"the model's chat template fails on these messages: {type(error).__name__}: {error}") from error


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
