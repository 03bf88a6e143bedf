"""What attention takes on this machine: asked of ggml in a process of its own, remembered, and left out where it cannot be known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.flows import attention
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.machine import AttentionCost, Device, Machine
from a3b_gguf.planner.plan import Wishes
from a3b_gguf.units import GIB

HERE = Machine(64 * GIB, 60 * GIB, 2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "a3b"


def test_it_is_measured_once(tiny_bf16: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read_facts(tiny_bf16)
    found = attention.with_attention(facts, Wishes(n_ctx=1024), HERE)
    assert found.attention is not None
    assert found.attention.n_kv == 512
    assert all(0 < seconds < 1 for seconds in (*found.attention.write, *found.attention.read))
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(attention, "MODULE", "no.such.module")
    assert attention.with_attention(facts, Wishes(n_ctx=1024), HERE).attention == found.attention
    other = attention.with_attention(facts, Wishes(n_ctx=2048), HERE)
    assert other.attention is None
    assert "could not be measured" in other.notes[0]


@pytest.mark.parametrize(
    ("machine", "wishes"),
    [
        (replace(HERE, described=True), Wishes()),
        (replace(HERE, gpus=(Device("CUDA0", 8 * GIB, 8 * GIB),)), Wishes()),
        (HERE, Wishes(n_parallel=4)),
    ],
    ids=["described", "with a GPU", "slots that share a cache"],
)
def test_it_is_not_asked_where_it_decides_nothing(tiny_bf16: Path, cache: Path, machine: Machine, wishes: Wishes) -> None:
    assert attention.with_attention(read_facts(tiny_bf16), wishes, machine) == machine
    assert not cache.exists()


@pytest.mark.parametrize(
    ("wishes", "n_ctx", "n_kv"),
    [
        (Wishes(), 4096, 2048),
        (Wishes(n_ctx=3000), 3072, 1536),
        (Wishes(n_ctx=300), 512, 256),
        (Wishes(n_ctx=8192, n_parallel=8, kv_split=True), 1024, 512),
        (Wishes(n_parallel=8, n_ctx_slot=256), 256, 256),
    ],
)
def test_half_of_a_slots_context_is_measured(tiny_bf16: Path, wishes: Wishes, n_ctx: int, n_kv: int) -> None:
    asked = attention.question(read_facts(tiny_bf16), wishes, HERE)
    assert asked is not None
    assert (asked.n_ctx, asked.n_kv, asked.heads["n_layer"]) == (n_ctx, n_kv, 1)


@pytest.mark.parametrize(
    "held",
    [
        "",
        "[]",
        "{}",
        '{"until": 1e12}',
        '{"n_kv": 256, "write": [0, 1], "read": [1, 1]}',
        '{"n_kv": 256, "write": [1, NaN], "read": [1, 1]}',
    ],
)
def test_what_cannot_be_read_is_measured_again(tmp_path: Path, held: str) -> None:
    file = tmp_path / "attention.json"
    cost = AttentionCost(512, (0.1, 0.2), (0.3, 0.4))
    assert attention.remember(file, cost, 60) == ()
    assert attention.recall(file) == cost
    until = json.loads(file.read_text())["until"]
    file.write_text(held.replace("{", f'{{"until": {until}, ', 1) if held.startswith('{"n_kv"') else held)
    assert attention.recall(file) is None
    attention.remember(file, cost, -1)
    assert attention.recall(file) is None, "too old"
    assert "cannot be written" in attention.remember(tmp_path, cost, 60)[0]
