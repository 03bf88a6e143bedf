"""What tests share: the embedded model, once as a checkpoint and once converted."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3b_convert import convert

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The embedded model's checkpoint folder."""
    return ROOT / "models" / "tiny-a3b"


@pytest.fixture(scope="session")
def tiny_bf16(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its GGUF in bf16, as `a3b convert` writes it."""
    path = tmp_path_factory.mktemp("tiny") / "tiny-bf16.gguf"
    convert(tiny_checkpoint, path)
    return path
