"""Plans: the right choice on the machines that people have, no budget broken on any, and refusals that help."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.errors import AnswerIsNo, UsageError
from a3b_gguf.flows.plan import plan_facts, read_facts
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.log import INFO
from a3b_gguf.machine import Device, Machine, with_ram, with_vram
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.draft import blank
from a3b_gguf.planner.plan import Plan, Wishes, kv_types
from a3b_gguf.planner.refuse import OR
from a3b_gguf.planner.rules import RULES
from a3b_gguf.units import GIB, MIB
from dry_run import dry_run
from kin_headers import SMALL_VOCAB, sparse_dense
from plan_summary import summary
from true_header import sparse_35b

BARE = Machine(ram_total=64 * GIB, ram_available=60 * GIB, n_cores=8)


@pytest.fixture(scope="module")
def b35(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Qwen3.6-35B-A3B, experts in IQ4_NL: 19.14 GiB, 432 MiB of experts a layer, 2.25 GiB of everything else."""
    return read_facts(sparse_35b(tmp_path_factory.mktemp("planner") / "35b.gguf", "iq4_nl"))


def machine(vram: float, ram: float = 64) -> Machine:
    """A described machine, sizes in GiB."""
    return with_ram(with_vram(BARE, (int(vram * GIB),)), int(ram * GIB))


def choice(made: Plan, name: str) -> str:
    return next(reason.value for reason in made.reasons if reason.choice == name)


def test_golden_plans(b35: Facts) -> None:
    """tests/golden/plans.txt, which a person reviewed; `python tests/plan_summary.py` writes it anew."""
    golden = Path(__file__).with_name("golden") / "plans.txt"
    assert summary(b35) == golden.read_text(encoding="utf-8")


# VRAM and RAM in GiB, context -> KV type, experts in RAM (whole layers, single tensors); None: does not fit
MACHINES = [
    (8, 16, 64000, None),  # 14 GiB of experts stay outside 8 GiB, a 16 GiB machine has 13 to give
    (8, 32, 64000, ("q8_0", 32, 2)),
    (16, 16, 64000, ("q8_0", 13, 2)),
    (24, 16, 64000, ("f16", 0, 0)),  # everything fits, so the cache stays exact and the file is only mapped
    (24, 32, 262144, ("q8_0", 0, 0)),
    (0, 16, 64000, None),
    (0, 32, 64000, ("f16", 0, 0)),
    (0, 32, 262144, ("q8_0", 0, 0)),
]


@pytest.mark.parametrize(("vram", "ram", "n_ctx", "expected"), MACHINES)
def test_plans_of_common_machines(b35: Facts, vram: int, ram: int, n_ctx: int, expected: tuple[str, int, int] | None) -> None:
    wishes = Wishes(n_ctx=n_ctx)
    if expected is None:
        with pytest.raises(AnswerIsNo, match="does not fit: RAM needs"):
            plan(b35, machine(vram, ram), wishes)
        return
    made = plan(b35, machine(vram, ram), wishes)
    load = made.load
    assert (load.kv_type_k, len(load.cpu_expert_layers), len(load.tensor_overrides)) == expected
    assert load.kv_type_v == load.kv_type_k
    assert load.cpu_expert_layers == tuple(range(expected[1]))
    assert load.n_gpu_layers == (41 if vram else 0)
    assert load.use_mmap == (expected[1] == 0 and vram > 0)
    assert (load.n_ctx, load.n_seq_max, load.n_outputs_max) == (n_ctx, 1, 1)
    assert load.flash_attn == (vram > 0 or load.kv_type_v == "q8_0")
    assert made.warnings == ()


def test_what_is_left_on_the_gpu_is_less_than_another_tensor(b35: Facts) -> None:
    """Single tensors fill what whole layers leave; their names are exact."""
    for vram in (6, 8, 10, 12, 14, 16, 20):
        made = plan(b35, machine(vram), Wishes(n_ctx=64000))
        room = made.budgets[1].room
        assert 0 <= room < 144 * MIB + 16 * MIB, (vram, room / MIB)  # staging may shrink when a tensor is put back
        layer = len(made.load.cpu_expert_layers)
        for pattern, where in made.load.tensor_overrides:
            assert where == "CPU"
            assert re.fullmatch(rf"\^blk\\\.{layer}\\\.ffn_(gate|up|down)_exps\\\.weight\$", pattern), pattern


def test_every_choice_has_one_line_of_reason(b35: Facts) -> None:
    for vram in (0, 8, 24):
        made = plan(b35, machine(vram, 64), Wishes())
        assert len({reason.choice for reason in made.reasons}) == len(made.reasons) >= 9
        for reason in made.reasons:
            assert reason.value
            assert 10 < len(reason.why) < 160, reason
            assert "\n" not in reason.why


def test_rules_are_pure_and_none_is_idle(b35: Facts) -> None:
    """Every rule returns a new draft and leaves the old one as it was; each but the last gives a reason."""
    draft = blank(b35, machine(16, 32), Wishes(n_ctx=64000))
    for rule in RULES:
        before = replace(draft)
        after = rule(draft)
        assert draft == before
        assert rule(draft) == after
        assert len(after.reasons) > len(draft.reasons) or rule.__name__ == "margin"
        assert rule.__doc__
        draft = after


# ---- contexts, slots, types


@pytest.mark.parametrize(
    ("asked", "trained", "n_ctx", "why"),
    [
        (None, 262144, 32768, "the default"),
        (None, 8192, 8192, "all that the model was trained for"),
        (64000, 262144, 64000, "asked for"),
        (64001, 262144, 64256, "rounded up from 64,001"),
        (1, 262144, 256, "rounded up from 1"),
        (262144, 262144, 262144, "asked for"),
    ],
)
def test_contexts(b35: Facts, asked: int | None, trained: int, n_ctx: int, why: str) -> None:
    made = plan(replace(b35, n_ctx_train=trained), machine(24), Wishes(n_ctx=asked))
    assert made.load.n_ctx == n_ctx
    assert made.load.n_ubatch <= n_ctx
    assert why in next(reason.why for reason in made.reasons if reason.choice == "context")
    assert any("too short" in warning for warning in made.warnings) == (n_ctx < 2048)


def test_a_context_beyond_the_model_is_refused_with_both_numbers(b35: Facts) -> None:
    with pytest.raises(UsageError, match="--ctx 262,145: the model was trained for 262,144 tokens"):
        plan(b35, machine(24), Wishes(n_ctx=262145))


def test_slots_share_the_context_and_pay_for_their_states(b35: Facts) -> None:
    one, four = (plan(b35, machine(24), Wishes(n_ctx=65536, n_parallel=n)) for n in (1, 4))
    assert (four.load.n_seq_max, four.load.n_outputs_max, four.load.kv_unified, four.load.n_ctx) == (4, 4, True, 65536)
    states = [sum(term.n_bytes for term in made.terms if term.name == "recurrent state") for made in (one, four)]
    assert states[1] == 4 * states[0]


def test_slots_may_have_a_context_of_their_own(b35: Facts) -> None:
    made = plan(b35, machine(24), Wishes(n_ctx_slot=16000, n_parallel=4))
    assert (made.load.kv_unified, made.load.reproducible, made.load.n_ctx) == (False, False, 4 * 16128)
    assert "16,128 for each of 4 slots" in next(reason.why for reason in made.reasons if reason.choice == "context")
    most = plan(replace(b35, n_ctx_train=8192), machine(24), Wishes(n_ctx_slot=8192, n_parallel=4))
    assert most.load.n_ctx == 4 * 8192  # more than one text may have, and right for four
    with pytest.raises(UsageError, match="--ctx-per-slot 8,193: the model was trained for 8,192 tokens"):
        plan(replace(b35, n_ctx_train=8192), machine(24), Wishes(n_ctx_slot=8193, n_parallel=4))
    with pytest.raises(UsageError, match="both say how much context"):
        Wishes(n_ctx=4096, n_ctx_slot=4096)
    assert plan(b35, machine(24), Wishes(n_ctx=65536, n_parallel=4, kv_split=True)).load.reproducible


def test_a_small_model_keeps_an_exact_cache_at_common_lengths(tiny_bf16: Path) -> None:
    """Its cache outgrows its weights at once, but both are nothing."""
    facts = read_facts(tiny_bf16)
    assert plan(facts, machine(0), Wishes(n_ctx=64000)).load.kv_type_k == "f16"
    assert plan(facts, machine(0), Wishes(n_ctx=262144)).load.kv_type_k == "q8_0"


@pytest.mark.parametrize(
    ("asked", "pair"), [("auto", None), ("f16", ("f16", "f16")), ("Q8_0", ("q8_0", "q8_0")), ("q8_0/q4_0", ("q8_0", "q4_0"))]
)
def test_kv_types_are_parsed(asked: str, pair: tuple[str, str] | None) -> None:
    assert kv_types(asked) == pair


@pytest.mark.parametrize("asked", ["q3_0", "q8_0/", "/f16", "q8_0/q4_0/f16", "", "auto/f16"])
def test_unknown_kv_types_are_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="there is no KV cache type") as caught:
        Wishes(kv_type=asked)
    assert "iq4_nl" in caught.value.hint


def test_kv_types_by_hand_are_obeyed_with_a_warning(b35: Facts) -> None:
    made = plan(b35, machine(16), Wishes(n_ctx=64000, kv_type="q8_0/q4_0"))
    assert (made.load.kv_type_k, made.load.kv_type_v) == ("q8_0", "q4_0")
    assert [warning[:23] for warning in made.warnings] == ["KV cache q8_0/q4_0: 4- ", "KV cache q8_0/q4_0: GPU"]
    assert plan(b35, machine(16), Wishes(kv_type="q8_0")).warnings == ()


def test_a_head_that_no_block_divides_keeps_f16(b35: Facts) -> None:
    odd = replace(b35, k_dim=80, v_dim=80)
    assert plan(odd, machine(8), Wishes(n_ctx=64000)).load.kv_type_k == "f16"
    with pytest.raises(UsageError, match="q8_0 goes by blocks of 32, a head of this model's K has 80"):
        plan(odd, machine(8), Wishes(kv_type="q8_0"))


# ---- by hand


def test_fewer_experts_in_ram_than_the_margin_allows_are_obeyed_until_nothing_is_left(b35: Facts) -> None:
    auto = len(plan(b35, machine(16), Wishes(n_ctx=64000, kv_type="q8_0")).load.cpu_expert_layers)
    tight = plan(b35, machine(16), Wishes(n_ctx=64000, kv_type="q8_0", n_cpu_moe=auto - 1))
    assert len(tight.load.cpu_expert_layers) == auto - 1
    assert any("stay free" in warning for warning in tight.warnings)
    with pytest.raises(AnswerIsNo, match="GPU0 needs") as caught:
        plan(b35, machine(16), Wishes(n_ctx=64000, kv_type="q8_0", n_cpu_moe=3))
    assert "leave --n-gpu-layers and --n-cpu-moe to the planner" in caught.value.hint


def test_more_experts_in_ram_than_needed_get_a_warning(b35: Facts) -> None:
    made = plan(b35, machine(16), Wishes(n_ctx=64000, n_cpu_moe=99))
    assert len(made.load.cpu_expert_layers) == 40
    assert any("be faster" in warning for warning in made.warnings)
    assert any("be faster" in w for w in plan(b35, machine(16), Wishes(n_gpu_layers=20)).warnings)


def test_no_layer_on_the_gpu_leaves_it_alone(b35: Facts) -> None:
    made = plan(b35, machine(16), Wishes(n_gpu_layers=0))
    assert made.load.n_gpu_layers == 0
    assert {term.device for term in made.terms} == {HOST}


def test_a_small_margin_is_obeyed_with_a_warning(b35: Facts) -> None:
    made = plan(b35, machine(16), Wishes(n_ctx=64000, margin=256 * MIB))
    assert len(made.load.cpu_expert_layers) < 13
    assert any("256.00 MiB" in warning for warning in made.warnings)


# ---- other shapes


def test_a_dense_model_gives_up_whole_layers(tmp_path: Path) -> None:
    facts = read_facts(sparse_dense(tmp_path / "dense.gguf"))
    facts = replace(facts, layers=tuple(replace(layer, dense=100 * layer.dense) for layer in facts.layers))  # 10 GiB
    made = plan(facts, machine(8), Wishes())
    assert 15 < made.load.n_gpu_layers < 31
    assert made.load.cpu_expert_layers == ()
    assert "no more fit" in next(reason.why for reason in made.reasons if reason.choice == "layers on GPU")
    with pytest.raises(AnswerIsNo, match="does not fit") as caught:
        plan(facts, machine(0, 8), Wishes())
    assert "weights in q4_k" in caught.value.hint


def test_two_gpus_take_what_one_cannot(b35: Facts) -> None:
    both = with_ram(with_vram(BARE, (12 * GIB, 12 * GIB)), 32 * GIB)
    made = plan(b35, both, Wishes(n_ctx=64000))
    assert {made.placement.layers[0], made.placement.output} == {"GPU0", "GPU1"}
    assert len(made.load.cpu_expert_layers) < 5
    assert not any(budget.short for budget in made.budgets)
    lopsided = plan(b35, with_vram(BARE, (16 * GIB, 6 * GIB)), Wishes(n_ctx=64000))
    assert not any(budget.short for budget in lopsided.budgets)


def test_a_gpu_without_its_own_memory_is_paid_from_ram(b35: Facts) -> None:
    shared = Device("MTL0", 24 * GIB, 24 * GIB, shares_ram=True)
    fits = Machine(32 * GIB, 30 * GIB, 8, (shared,))
    ram = plan(b35, fits, Wishes()).budgets[0]
    assert ram.need > b35.weight_bytes
    with pytest.raises(AnswerIsNo, match="RAM needs"):
        plan(b35, replace(fits, ram_available=16 * GIB), Wishes())


def test_a_gpu_too_small_for_a_layer_is_left_alone(b35: Facts) -> None:
    made = plan(b35, machine(1.2, 64), Wishes())
    assert made.load.n_gpu_layers == 0
    assert "no room" in next(reason.why for reason in made.reasons if reason.choice == "layers on GPU")


# ---- refusals


def test_a_refusal_names_need_have_and_three_changes_that_work(b35: Facts) -> None:
    where, wishes = machine(8, 16), Wishes(n_ctx=262144, n_parallel=8, kv_type="f16")
    with pytest.raises(AnswerIsNo) as caught:
        plan(b35, where, wishes)
    assert caught.value.message.startswith("Qwen3.6 35B A3B does not fit: RAM needs ")
    assert "16.00 GiB, 2.00 GiB in use, 1.00 GiB reserve" in caught.value.message
    # A 24 GiB machine that is only a little short has cheap changes.
    where = machine(24, 16)
    crowded = Wishes(n_ctx=262144, n_parallel=200, kv_type="f16")
    with pytest.raises(AnswerIsNo) as caught:
        plan(b35, where, crowded)
    hints = caught.value.hint.split(OR)
    assert len(hints) == 3
    assert hints[0].startswith("--parallel ")
    slots = int(hints[0].split()[1])
    assert plan(b35, where, replace(crowded, n_parallel=slots)).load.n_seq_max == slots
    with pytest.raises(AnswerIsNo):
        plan(b35, where, replace(crowded, n_parallel=slots + 1))
    assert all(hint.endswith("iB)") for hint in hints)


def test_each_kind_of_change_is_offered_where_it_helps(b35: Facts) -> None:
    """Every proposal that is offered is then obeyed and found to fit."""
    cases = [
        (machine(8, 20), Wishes(n_ctx=262144, kv_type="f16"), ("--kv-type q8_0", "--ctx ")),
        (machine(0, 23), Wishes(n_ctx=65536, kv_type="f16"), ("--kv-type q8_0", "--ctx", "a smaller quantization")),
        (machine(0, 20), Wishes(n_ctx=2048), ("a smaller quantization", "more RAM")),
        (machine(8, 16.6), Wishes(n_ctx=64000), ("--ctx", "--margin", "a smaller quantization")),
    ]
    for where, wishes, expected in cases:
        with pytest.raises(AnswerIsNo) as caught:
            plan(b35, where, wishes)
        hints = caught.value.hint.split(OR)
        for start in expected:
            hint = next((hint for hint in hints if hint.startswith(start)), None)
            assert hint, (start, hints)
            words = hint.split()
            if words[0] == "--ctx":
                shorter = replace(wishes, n_ctx=int(words[1]))
                plan(b35, where, shorter)
                with pytest.raises(AnswerIsNo):
                    plan(b35, where, replace(wishes, n_ctx=int(words[1]) + 1024))
            elif words[0] == "--kv-type":
                plan(b35, where, replace(wishes, kv_type=words[1]))


def test_uneven_layers_are_counted_each_by_its_own_size(b35: Facts) -> None:
    """llama-quantize makes some layers larger; the fewest that fit is then not a division."""

    def larger(layer: Layer) -> Layer:
        return replace(layer, expert_tensors=tuple((name, 2 * n_bytes) for name, n_bytes in layer.expert_tensors))

    uneven = replace(b35, layers=tuple(larger(layer) if i < 5 else layer for i, layer in enumerate(b35.layers)))
    even, skewed = (plan(facts, machine(16), Wishes(n_ctx=64000)) for facts in (b35, uneven))
    assert len(even.load.cpu_expert_layers) == 13
    assert len(skewed.load.cpu_expert_layers) == 14  # one more: the copies of large tensors take more room on the GPU
    in_ram = [sum(t.n_bytes for t in made.terms if t.name == "routed experts" and t.device == HOST) for made in (even, skewed)]
    assert in_ram[1] - in_ram[0] > 5 * 400 * MIB


# ---- against the real thing


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(n_ctx=4096, n_parallel=4, kv_type="q8_0")])
def test_llama_cpp_takes_what_the_plan_predicts(tiny_bf16: Path, wishes: Wishes) -> None:
    """tiny-a3b loaded by the plan in a child process: every buffer that llama.cpp prints, within 2 %."""
    made = plan_facts(read_facts(tiny_bf16), wishes, with_vram(BARE, (0,)))
    real = dry_run(tiny_bf16, made.load, real=True)
    need = {term.name: term.n_bytes / MIB for term in made.terms}
    assert need["KV cache"] == pytest.approx(real["kv"], abs=0.00501)
    assert need["recurrent state"] == pytest.approx(real["recurrent"], abs=0.00501)
    assert need["output buffer"] == pytest.approx(real["output"], abs=0.00501)
    ours = sum(need.values()) - need["checkpoints of recurrent state"] - need["kept texts"]  # the engine's own, not llama.cpp's
    ours -= need.get("attention scores as V is", 0)  # the CPU's work space, which is not printed
    assert ours == pytest.approx(sum(real[name] for name in ("kv", "recurrent", "output", "compute", "model")), rel=0.005)


def test_the_door_to_llama_cpp_obeys_the_plan(tiny_bf16: Path) -> None:
    made = plan_facts(read_facts(tiny_bf16), Wishes(n_ctx=2048, n_parallel=2), with_vram(BARE, (0,)))
    with load_model(tiny_bf16, made.load) as model, open_context(model, made.load) as context:
        assert (context.n_ctx, context.n_ctx_seq) == (2048, 2048)
        said = " ".join(line.text for line in context.log if line.level >= INFO)
    assert "size =    1.00 MiB (  2048 cells,   1 layers,  2/1 seqs)" in said


def test_small_vocabularies_change_only_what_they_should(b35: Facts, tmp_path: Path) -> None:
    small = read_facts(sparse_35b(tmp_path / "small.gguf", "iq4_nl", SMALL_VOCAB))
    assert small.layers == b35.layers
    assert small.n_vocab == SMALL_VOCAB
