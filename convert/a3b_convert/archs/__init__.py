"""Every architecture that can be converted, in one table."""

from __future__ import annotations

from a3b_convert.archs import qwen3moe, qwen3next, qwen3vlmoe, qwen35moe
from a3b_convert.archs.base import Arch
from a3b_convert.config import Config
from a3b_gguf.errors import BadInput

ARCHS: tuple[Arch, ...] = (qwen35moe.ARCH, qwen3moe.ARCH, qwen3next.ARCH, qwen3vlmoe.ARCH)


def find(config: Config) -> Arch:
    """The architecture that config.json names. Raises BadInput that lists the known ones."""
    for arch in ARCHS:
        if config.architecture in arch.hf_names:
            return arch
    known = ", ".join(name for arch in ARCHS for name in arch.hf_names)
    raise BadInput(f"{config.path}: architecture {config.architecture} is not known", f"known: {known}")
