"""Published chat templates, by name. Where they come from: tests/golden/templates/README.md, and README.md beside those that a3b ships."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "golden" / "templates"
PUBLISHED = Path(__file__).parent.parent / "a3b_gguf" / "template" / "published"
TINY = Path(__file__).parent.parent / "models" / "tiny-a3b" / "chat_template.jinja"
FILES = {
    "qwen3.5": PUBLISHED / "qwen3.5.jinja",
    "qwen3": PUBLISHED / "qwen3.jinja",
    "qwen3-coder": PUBLISHED / "qwen3-coder.jinja",
    "qwen2.5": FOLDER / "Qwen-Qwen2.5-7B-Instruct.jinja",
    "qwq": FOLDER / "Qwen-QwQ-32B.jinja",
    "phi-3.5": PUBLISHED / "phi-3.5.jinja",
    "chatml": PUBLISHED / "chatml.jinja",
    "tiny-a3b": TINY,
}
NAMES = ("qwen3.6", *FILES)
# What Qwen3.6 changed in the template of Qwen3.5: thinking of earlier turns is kept on demand, and every value that is no string is JSON.
EDITS_OF_QWEN36 = (
    (
        "{%- if loop.index0 > ns.last_query_index %}",
        "{%- if (preserve_thinking is defined and preserve_thinking is true) or (loop.index0 > ns.last_query_index) %}",
    ),
    (
        "args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) "
        "else args_value | string",
        "args_value | string if args_value is string else args_value | tojson | safe",
    ),
)


def template_text(name: str) -> str:
    """The text of a template of NAMES."""
    text = FILES["qwen3.5" if name == "qwen3.6" else name].read_text(encoding="utf-8")
    for old, new in EDITS_OF_QWEN36 if name == "qwen3.6" else ():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text
