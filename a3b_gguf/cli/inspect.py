"""`a3b inspect`: what a model file holds, without loading it."""

from __future__ import annotations
def command() -> None:
    """Show a file's header, tensors and sizes by role."""
