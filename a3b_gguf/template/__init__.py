"""A model's own chat template: untrusted code from the file. `open_template` is the door; jinja2 is imported only when one is compiled.

template = open_template(text, bos_token, eos_token)     in process when it is a known one, else in a process that can be ended
prompt = template.render(messages, tools, True, {"enable_thinking": False})
"""

from a3b_gguf.template.compiled import ChatTemplate
from a3b_gguf.template.guarded import GuardedTemplate, Limits, open_template
from a3b_gguf.template.known import KNOWN, known_name, published_names, published_text, template_sha256
from a3b_gguf.template.values import (
    END_THINK,
    MAX_TEMPLATE_CHARS,
    NO_OPTIONS,
    RESERVED,
    THINK,
    BadTemplate,
    Template,
    TemplateRefused,
    ends_in_thinking,
)

__all__ = [
    "END_THINK",
    "KNOWN",
    "MAX_TEMPLATE_CHARS",
    "NO_OPTIONS",
    "RESERVED",
    "THINK",
    "BadTemplate",
    "ChatTemplate",
    "GuardedTemplate",
    "Limits",
    "Template",
    "TemplateRefused",
    "ends_in_thinking",
    "known_name",
    "open_template",
    "published_names",
    "published_text",
    "template_sha256",
]
