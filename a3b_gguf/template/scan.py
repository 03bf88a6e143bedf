"""What a template must not even try: found in its syntax tree, so that a branch which never runs in a test hides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import nodes

# Jinja's helpers that published escapes climb out of (CVE-2024-34359, CVE-2026-5760); no chat template needs one of them.
ESCAPE_NAMES = frozenset(("lipsum", "cycler", "joiner", "self", "url_for", "get_flashed_messages", "config", "request"))


def forbidden(tree: nodes.Template) -> Iterator[tuple[int, str]]:
    """Line and name of every access to Python's inner attributes, of every helper that leads there, and of other files' templates."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Getattr, nodes.Const, nodes.Name, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        if isinstance(node, nodes.Getattr) and _is_inner(node.attr):
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, nodes.Const) and isinstance(node.value, str) and _is_inner(node.value):
            yield node.lineno, repr(node.value)
        elif isinstance(node, nodes.Name) and node.ctx == "load" and node.name in ESCAPE_NAMES:
            yield node.lineno, node.name
        elif isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            yield node.lineno, type(node).__name__.lower()


def _is_inner(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")
