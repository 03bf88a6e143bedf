"""Rules about what a CPU and RAM decide: flash attention, texts that are kept without a slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.errors import AnswerIsNo
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.machine import AttentionCost
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Wishes
from a3b_gguf.units import GIB
from kin_headers import sparse_dense
from test_planner_rules import b35 as b35
from test_planner_rules import machine, reason, term


def test_a_cpu_keeps_scores_where_ram_has_room_for_them(b35: Facts) -> None:
    made = plan(b35, machine(ram=64), Wishes())
    assert (made.load.flash_attn, made.load.n_ubatch) == (False, 256)
    assert term(made, "attention scores as V is") == 2 * 32768 * 256 * b35.n_head
    value, why = reason(made, "flash attention")
    assert value == "off"
    assert "more" in why
    assert plan(b35, machine(ram=64), Wishes(n_ubatch=512)).load.n_ubatch == 512
    assert plan(b35, machine(24), Wishes()).load.flash_attn


@pytest.mark.parametrize(
    ("ram", "wishes", "why"),
    [
        (24, Wishes(n_ctx=65536), "more than a quarter"),
        (64, Wishes(kv_type="q8_0"), "quantized V"),
        (64, Wishes(n_parallel=4), "--ctx-per-slot"),
    ],
)
def test_a_cpu_has_flash_attention_where_scores_cannot_be(b35: Facts, ram: int, wishes: Wishes, why: str) -> None:
    made = plan(b35, machine(ram=ram), wishes)
    assert made.load.flash_attn
    assert why in reason(made, "flash attention")[1]


@pytest.mark.parametrize("wishes", [Wishes(n_parallel=4, n_ctx_slot=8192), Wishes(kv_type="q8_0/f16"), Wishes(n_parallel=3, kv_split=True)])
def test_slots_with_a_cache_of_their_own_have_scores_of_their_own(b35: Facts, wishes: Wishes) -> None:
    made = plan(b35, machine(ram=64), wishes)
    assert not made.load.flash_attn
    assert not any(budget.short for budget in made.budgets)


def test_what_was_measured_decides_on_flash_attention(b35: Facts, tmp_path: Path) -> None:
    dense = read_facts(sparse_dense(tmp_path / "dense.gguf"))
    assert dense.k_dim == 64
    assert plan(dense, machine(ram=64), Wishes()).load.flash_attn, "nobody knows"
    slow, fast = AttentionCost(2048, (7e-3, 6.5e-3), (0.9e-3, 1.1e-3)), AttentionCost(2048, (20e-3, 8e-3), (0.9e-3, 1.1e-3))
    for facts in (dense, b35):
        for cost, wanted in ((slow, True), (fast, False)):
            made = plan(facts, replace(machine(ram=64), attention=cost), Wishes())
            assert made.load.flash_attn is wanted
            assert "after 2,048 takes" in reason(made, "flash attention")[1]
    assert fast.gain == pytest.approx((20 + 4 * 0.9) / (8 + 4 * 1.1))


def test_kept_texts_take_what_ram_can_spare(b35: Facts, tmp_path: Path) -> None:
    roomy = plan(b35, machine(24, ram=64), Wishes(n_ctx=32768))
    assert roomy.load.text_bytes == term(roomy, "kept texts") == GIB
    short = plan(b35, machine(24, ram=64), Wishes(n_ctx=4096))
    assert short.load.text_bytes == 2 * (4096 * 20480 + 5 * b35.state_bytes), "f16: 20 KiB a token; its state and four checkpoints"
    slots = plan(b35, machine(24, ram=64), Wishes(n_parallel=4, n_ctx_slot=4096))
    assert slots.load.text_bytes == short.load.text_bytes
    tight = plan(b35, machine(12, ram=16), Wishes(n_ctx=262144))
    assert 0 < tight.load.text_bytes < GIB // 4
    assert not tight.budgets[0].short
    assert plan(b35, machine(24, ram=64), Wishes(text_bytes=3 * GIB)).load.text_bytes == 3 * GIB
    none = plan(b35, machine(24, ram=64), Wishes(text_bytes=0))
    assert (none.load.text_bytes, reason(none, "kept texts")[0]) == (0, "none")
    with pytest.raises(AnswerIsNo) as refused:
        plan(b35, machine(24, ram=16), Wishes(text_bytes=64 * GIB))
    assert "--keep-texts 0" in refused.value.hint
    dense = read_facts(sparse_dense(tmp_path / "dense.gguf"))
    pools = replace(dense, pools=True)
    assert plan(dense, machine(8), Wishes()).load.text_bytes > 0
    assert plan(pools, machine(8), Wishes()).load.text_bytes == 0
    assert any("makes vectors" in w for w in plan(pools, machine(8), Wishes(text_bytes=GIB)).warnings)
