"""What tests share: the embedded model, once as a checkpoint and once converted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from a3b_convert import convert
from a3b_gguf.probe.bandwidth import cache_file, remember
from a3b_gguf.probe.cores import cores
from a3b_gguf.template import guarded, known_name
from tiny import TEMPLATE

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a3b keeps for the user is kept apart, with the bandwidth of RAM already in it: measuring takes a second.

    Hundreds of processes are started: without kept bytecode each would compile our sources again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        remember(cache_file(), cores().count, 40e9)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_template() -> Iterator[None]:
    """The template of the checkpoints that tests write is rendered in process, as those are that a person has read.

    Hundreds of them are converted, and each would start a process. How the others are guarded: test_guarded and test_template_lint.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded, "known_name", lambda text: "the tests' own" if text == TEMPLATE else known_name(text))
        yield


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
