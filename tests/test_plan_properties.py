"""Plans of any wish on any machine: no budget is broken, and more memory never makes a plan worse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_gguf.errors import A3BError
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.machine import Machine, with_ram, with_vram
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.units import GIB
from true_header import sparse_35b

BARE = Machine(ram_total=64 * GIB, ram_available=60 * GIB, n_cores=8)
GIBS = st.integers(0, 48 * 4).map(lambda quarters: quarters / 4)
WISHES = st.builds(
    Wishes,
    n_ctx=st.none() | st.integers(1, 262144),
    n_parallel=st.integers(1, 16),
    kv_type=st.sampled_from(["auto", "f16", "q8_0", "q8_0/q4_0"]),
    n_gpu_layers=st.none() | st.integers(0, 50),
    n_cpu_moe=st.none() | st.integers(0, 50),
    margin=st.integers(0, 3 * GIB),
)

@pytest.fixture(scope="module")
def b35(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Qwen3.6-35B-A3B with experts in IQ4_NL."""
    return read_facts(sparse_35b(tmp_path_factory.mktemp("properties") / "35b.gguf", "iq4_nl"))


@given(vram=GIBS, second=GIBS, ram=st.integers(2, 96), wishes=WISHES)
@settings(max_examples=40, deadline=None)
def test_no_plan_breaks_a_budget(b35: Facts, vram: float, second: float, ram: int, wishes: Wishes) -> None:
    where = with_ram(with_vram(BARE, (int(vram * GIB), int(second * GIB))), ram * GIB)
    by_hand = wishes.n_gpu_layers is not None or wishes.n_cpu_moe is not None
    try:
        made = plan(b35, where, wishes)
    except A3BError as error:
        assert error.hint
        return
    for budget in made.budgets:
        assert budget.left >= (0 if by_hand and budget.device != HOST else budget.reserve) or budget.need == 0
    assert sum(budget.need for budget in made.budgets) == sum(term.n_bytes for term in made.terms)
    assert made.load.n_outputs_max >= made.load.n_seq_max
    assert made.load.n_ctx % 256 == 0


def goodness(made: Plan) -> tuple[int, int]:
    """Whole layers on the GPU, then those with their experts."""
    layers = [i for i in range(made.facts.n_layer) if made.placement.layers[i] != HOST]
    return len(layers), sum(made.placement.expert_device(i) != HOST for i in layers)


@given(vram=st.tuples(GIBS, GIBS).map(sorted), n_ctx=st.integers(256, 262144), kv_type=st.sampled_from(["auto", "f16", "q8_0"]))
@settings(max_examples=20, deadline=None)
def test_more_vram_never_brings_less_onto_the_gpu(b35: Facts, vram: list[float], n_ctx: int, kv_type: str) -> None:
    roomy = with_ram(BARE, 128 * GIB)
    small, large = (plan(b35, with_vram(roomy, (int(size * GIB),)), Wishes(n_ctx=n_ctx, kv_type=kv_type)) for size in vram)
    assert goodness(small) <= goodness(large)
    if goodness(small)[0] == 40:
        assert len(large.load.cpu_expert_layers) <= len(small.load.cpu_expert_layers)
