"""Headers that nobody should write, planned: facts and a plan come out, or one of our errors does. Never a traceback, never for long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.errors import A3BError, BadInput
from a3b_gguf.gguf_file import GGUFFile, read_gguf
from a3b_gguf.machine import Machine, with_ram, with_vram
from a3b_gguf.memory.read import facts_of
from a3b_gguf.metadata import Field
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Wishes
from a3b_gguf.units import GIB
from command import assert_refused
from inside import inside as a3b
from kin_headers import sparse_30b, sparse_35b_mtp, sparse_80b, sparse_dense

NUMBERS = (0, 1, 2, 3, 7, 255, 4097, (1 << 31) - 1, (1 << 32) - 1, -1, 1 << 40)
VALUES: tuple[object, ...] = (*NUMBERS, "text", 1.5, True, [], [1, 2, 3], [0] * 48, None)
WISHES = (Wishes(), Wishes(n_ctx=65536, n_parallel=4, n_draft=2), Wishes(n_cpu_moe=3, kv_type="q8_0"), Wishes(n_gpu_layers=7))


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[GGUFFile]:
    folder = tmp_path_factory.mktemp("hostile")
    hybrids = [sparse_35b_mtp(folder / "35b.gguf"), sparse_80b(folder / "80b.gguf")]
    return [read_gguf(file) for file in (hybrids[0], sparse_30b(folder / "30b.gguf"), hybrids[1], sparse_dense(folder / "dense.gguf"))]


def attempt(file: GGUFFile, wishes: Wishes) -> str:
    """What happens: "planned", or the name of our error."""
    where = with_ram(with_vram(Machine(0, 0, 8), (12 * GIB, 8 * GIB)), 64 * GIB)
    try:
        plan(facts_of(file), where, wishes)
    except A3BError as error:
        assert error.message
        return type(error).__name__
    return "planned"


def changed(file: GGUFFile, changes: Sequence[tuple[str, object]]) -> GGUFFile:
    metadata = dict(file.metadata)
    for key, value in changes:
        if value is None:
            metadata.pop(key)
        else:
            metadata[key] = Field("arr" if isinstance(value, list) else metadata[key].kind, value, "u32" if isinstance(value, list) else "")
    return replace(file, metadata=metadata)


def damaged(headers: list[GGUFFile], seed: int, count: int) -> dict[str, int]:
    """Outcomes of `count` headers with one or two numbers changed."""
    chance = random.Random(seed)
    found: dict[str, int] = {}
    for _ in range(count):
        file = chance.choice(headers)
        keys = [key for key in file.metadata if key.startswith(f"{file.architecture}.")]
        changes = [(key, chance.choice(VALUES)) for key in chance.sample(keys, chance.choice((1, 1, 2)))]
        outcome = attempt(changed(file, changes), chance.choice(WISHES))
        found[outcome] = found.get(outcome, 0) + 1
    return found


def test_no_number_in_a_header_breaks_the_planner(headers: list[GGUFFile]) -> None:
    found = damaged(headers, seed=1, count=60)
    assert found["planned"] > 10
    assert found["BadInput"] > 10
    assert set(found) <= {"planned", "BadInput", "AnswerIsNo", "UsageError"}


@pytest.mark.prove
def test_no_number_in_a_header_breaks_the_planner_a_thousand_times(headers: list[GGUFFile]) -> None:
    assert set(damaged(headers, seed=2, count=1000)) <= {"planned", "BadInput", "AnswerIsNo", "UsageError"}


@pytest.mark.parametrize("key", ["ssm.inner_size", "ssm.state_size", "ssm.conv_kernel", "ssm.time_step_rank", "ssm.group_count"])
def test_a_hybrid_without_its_dimensions_is_refused(headers: list[GGUFFile], key: str) -> None:
    for value in (None, 0):
        with pytest.raises(BadInput, match=key):
            facts_of(changed(headers[0], [(f"qwen35moe.{key}", value)]))


def test_experts_without_a_number_of_them_are_refused(headers: list[GGUFFile]) -> None:
    for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
        with pytest.raises(BadInput, match=key):
            facts_of(changed(headers[1], [(f"qwen3moe.{key}", None)]))
    with pytest.raises(BadInput, match="uses 9 of 8 experts"):
        facts_of(changed(headers[1], [("qwen3moe.expert_count", 8), ("qwen3moe.expert_used_count", 9)]))


def test_a_projector_is_read_and_another_file_refused(headers: list[GGUFFile], tmp_path: Path) -> None:
    model = headers[3].path
    assert_refused(a3b("plan", model, "--vram", "0", "--ram", "32GiB", "--mmproj", model), 3, "no mmproj file", "llama")
    assert_refused(a3b("plan", model, "--vram", "0", "--ram", "32GiB", "--mmproj", tmp_path / "none.gguf"), 3, "none.gguf")
