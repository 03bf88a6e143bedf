"""What tests share: the embedded model, once as a checkpoint and once converted."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The embedded model's checkpoint folder."""
    return ROOT / "models" / "tiny-a3b"


@pytest.fixture(scope="session")
def tiny_bf16() -> Path:
    """Its GGUF in bf16."""
    return Path("/work/dev/tiny-bf16.gguf")
