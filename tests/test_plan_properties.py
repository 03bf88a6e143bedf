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
from a3b_gguf.planner.decide import fits, plan, without_help
from a3b_gguf.planner.place import closest
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.refuse import NoRoom, changes_for
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


REFUSED = [  # VRAM and RAM in GiB
    ((8,), 16, Wishes(n_ctx=262144, n_parallel=4)),
    ((), 16, Wishes(n_ctx=64000)),
    ((4, 6), 6, Wishes(n_ctx=131072, kv_type="f16")),
    ((8,), 64, Wishes(n_ctx=64000, n_cpu_moe=10, n_ubatch=2048)),
    ((8,), 4, Wishes(n_ctx=64000, n_gpu_layers=99, n_cpu_moe=0)),
    ((), 20, Wishes(n_ctx_slot=65536, n_parallel=8)),
]


@pytest.mark.parametrize(("vram", "ram", "wishes"), REFUSED, ids=lambda value: str(value)[:40])
def test_each_of_three_changes_makes_it_fit(b35: Facts, vram: tuple[int, ...], ram: int, wishes: Wishes) -> None:
    """Planned anew with a change and nothing else, what was refused fits; where no flag is enough alone, two are named together."""
    where = with_ram(with_vram(BARE, tuple(size * GIB for size in vram)), ram * GIB)
    with pytest.raises(NoRoom) as caught:
        without_help(b35, where, wishes)
    changes = changes_for(caught.value.draft, closest(caught.value.draft), fits)
    assert len(changes) == 3
    assert len({change.texts for change in changes}) == 3
    for change in changes:
        assert 1 <= len(change.texts) <= 2
        assert all(n_bytes > 0 for n_bytes in change.n_bytes), str(change)
        changed = change.draft
        assert changed.facts != b35 or changed.machine != where or changed.wishes != wishes
        assert plan(changed.facts, changed.machine, changed.wishes).budgets[0].short == 0


@given(vram=st.lists(st.integers(2, 16), max_size=2), ram=st.integers(2, 16), wishes=WISHES)
@settings(max_examples=4, deadline=None)
def test_whatever_is_offered_fits(b35: Facts, vram: list[int], ram: int, wishes: Wishes) -> None:
    where = with_ram(with_vram(BARE, tuple(size * GIB for size in vram)), ram * GIB)
    try:
        without_help(b35, where, wishes)
    except NoRoom as error:
        changes = changes_for(error.draft, closest(error.draft), fits)
        assert changes
        for change in changes:
            plan(change.draft.facts, change.draft.machine, change.draft.wishes)
    except A3BError:
        return


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
