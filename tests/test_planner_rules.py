"""The planner's choices one by one: what people reported as painful, and what a plan does about it (P-numbers: docs/plan.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf import gpus
from a3b_gguf.clip_bounds import KVAdvice
from a3b_gguf.errors import AnswerIsNo, UsageError
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.llama.load import load_model
from a3b_gguf.machine import Device, Machine, with_gpus, with_ram, with_vram
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST
from a3b_gguf.planner.decide import plan, without_help
from a3b_gguf.planner.place import best
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.units import GIB, MIB
from kin_headers import SMALL_VOCAB, sparse_35b_mtp, sparse_dense
from true_header import sparse_35b

BARE = Machine(ram_total=64 * GIB, ram_available=60 * GIB, n_cores=8)


@pytest.fixture(scope="module")
def b35(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return read_facts(sparse_35b(tmp_path_factory.mktemp("rules") / "35b.gguf", "iq4_nl"))


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return read_facts(sparse_35b_mtp(tmp_path_factory.mktemp("rules") / "mtp.gguf"))


def machine(*vram: float, ram: float = 64) -> Machine:
    return with_ram(with_vram(BARE, tuple(int(size * GIB) for size in vram)), int(ram * GIB))


def carded(*names: str, ram: int = 64) -> Machine:
    return with_gpus(with_ram(BARE, ram * GIB), gpus.devices(tuple(gpus.find(name) for name in names), ram * GIB))


def reason(made: Plan, choice: str) -> tuple[str, str]:
    return next((each.value, each.why) for each in made.reasons if each.choice == choice)


def term(made: Plan, name: str) -> int:
    return sum(each.n_bytes for each in made.terms if each.name == name)


# ---- placement under both budgets


def test_a_tiny_gpu_is_filled_by_whatever_leaves_ram_enough(b35: Facts) -> None:
    """Found by trying RAM sizes: where the first placement that fits the GPU lacks RAM, another one may not."""
    for vram in (2.5, 4.5):
        smallest = None
        for ram in range(18 * 1024, 24 * 1024, 256):
            try:
                made = without_help(b35, machine(vram, ram=ram / 1024), Wishes(n_ctx=8192))
            except AnswerIsNo:
                continue
            smallest = smallest or ram
            assert not any(budget.short for budget in made.budgets)
        assert smallest is not None
        # No RAM is wasted: what is missing with 256 MiB less is less than a tensor that could not be split.
        tight = plan(b35, machine(vram, ram=smallest / 1024), Wishes(n_ctx=8192))
        assert tight.budgets[0].room < 256 * MIB + 160 * MIB


def test_several_gpus_are_split_by_their_room_and_told_so(b35: Facts) -> None:
    """P6: an odd split. Layers of each card as llama.cpp is told them, whatever is free when it loads."""
    for sizes in ((12, 12), (16, 6), (24, 8), (8, 8, 8), (6, 16), (8, 12, 6, 6)):
        made = plan(b35, machine(*sizes), Wishes(n_ctx=64000))
        assert sum(made.load.tensor_split) == made.load.n_gpu_layers == 41
        assert made.load.tensor_split == tuple(map(float, made.placement.tensor_split))
        for budget in made.budgets:
            assert not budget.short
        counts = [sum(1 for name in (*made.placement.layers, made.placement.output) if name == f"GPU{i}") for i in range(len(sizes))]
        assert counts == list(made.placement.tensor_split)
        if made.placement.has_overrides:  # then every card is full
            assert all(budget.room < 600 * MIB for budget in made.budgets[1:]), [budget.room / MIB for budget in made.budgets]
    assert plan(b35, machine(24), Wishes()).load.tensor_split == ()


def test_more_cards_never_hold_less(b35: Facts) -> None:
    held = [term_on_gpus(plan(b35, machine(*sizes), Wishes(n_ctx=64000))) for sizes in ((8,), (8, 6), (8, 6, 6))]
    assert held == sorted(held)


def term_on_gpus(made: Plan) -> int:
    return sum(each.n_bytes for each in made.terms if each.name == "routed experts" and each.device != HOST)


def test_dense_layers_stay_where_attention_is_fast(b35: Facts) -> None:
    """P6: experts go to RAM first; whole layers only when all experts are there and it is still too much."""
    for vram in (5, 6, 8, 12):
        made = plan(b35, machine(vram), Wishes(n_ctx=32768))
        assert made.load.n_gpu_layers == 41
    made = plan(b35, machine(3), Wishes(n_ctx=131072))
    assert 0 < made.load.n_gpu_layers < 41


def test_overrides_reach_the_loader(tiny_bf16: Path) -> None:
    """Whole layers and single tensors, named as llama.cpp names them when it moves them. No GPU is needed for that."""
    facts = read_facts(tiny_bf16)
    card = Device("CUDA0", 1 * GIB, 1 * GIB)
    wanted = plan(facts, replace(BARE, gpus=(card,)), Wishes(n_ctx=2048, n_cpu_moe=2))
    load = replace(wanted.load, n_gpu_layers=0, tensor_overrides=((r"^blk\.3\.ffn_down_exps\.weight$", "CPU"),))
    with load_model(tiny_bf16, load) as model:
        moved = [line.text.split()[1] for line in model.log if "buffer type overridden to" in line.text]
    assert sorted(moved) == sorted(
        [*(f"blk.{i}.ffn_{part}_exps.weight" for i in (0, 1) for part in ("gate", "up", "down")), "blk.3.ffn_down_exps.weight"]
    )


# ---- batch, copying, threads


def test_large_pieces_are_chosen_with_the_experts_that_they_push_out(b35: Facts) -> None:
    """P15: 512 tokens copy the experts in RAM four times as often as 2,048."""
    made = plan(b35, machine(12), Wishes(n_ctx=64000))
    small = plan(b35, machine(12), Wishes(n_ctx=64000, n_ubatch=512))
    assert (made.load.n_ubatch, small.load.n_ubatch) == (2048, 512)
    assert made.speed.prefill.middle > 1.5 * small.speed.prefill.middle
    assert made.speed.turn_seconds < small.speed.turn_seconds
    assert reason(small, "batch") == ("512 tokens", "asked for")
    assert plan(b35, machine(24), Wishes(n_ctx=64000)).load.n_ubatch == 512


def test_logits_are_for_the_rows_that_are_sampled(b35: Facts) -> None:
    """P2: a row for each token of a batch takes 0.5 to 4 GiB."""
    for rows in (512, 4096):
        made = plan(b35, machine(12), Wishes(n_ctx=64000, n_ubatch=rows, n_parallel=2))
        assert made.load.n_outputs_max == 2
        assert term(made, "output buffer") == 2 * 4 * 248320
        assert term(made, "compute buffer") < rows * (248320 * 4) or rows == 512


def test_copying_experts_starts_where_it_pays(b35: Facts) -> None:
    """P14: llama.cpp copies all experts of a layer for 32 tokens. Faster RAM computes longer, a faster link copies sooner."""
    slow_link = plan(b35, replace(machine(12), gpus=(Device("CUDA0", 12 * GIB, 12 * GIB, pcie=8e9),)), Wishes(n_ctx=32768))
    fast_link = plan(b35, replace(machine(12), gpus=(Device("CUDA0", 12 * GIB, 12 * GIB, pcie=63e9),)), Wishes(n_ctx=32768))
    variables = [dict(made.environment).get("GGML_OP_OFFLOAD_MIN_BATCH", "32") for made in (slow_link, fast_link)]
    assert int(variables[0]) > int(variables[1]) >= 32
    assert plan(b35, machine(24), Wishes(n_ctx=32768)).environment == ()


def test_threads_are_physical_cores(b35: Facts) -> None:
    """P18."""
    made = plan(b35, replace(machine(12), n_cores=6), Wishes())
    assert (made.load.n_threads, made.load.n_threads_batch) == (6, 6)


# ---- KV types


def test_a_q8_cache_is_not_chosen_where_it_was_measured_to_be_slow(b35: Facts) -> None:
    """P20: with Vulkan it halves prompt speed; on CUDA it makes room."""
    assert plan(b35, carded("RTX 3060 12GB"), Wishes(n_ctx=64000)).load.kv_type_k == "q8_0"
    made = plan(b35, carded("RX 6700 XT"), Wishes(n_ctx=64000))
    assert made.load.kv_type_k == "f16"
    assert "halve prompt speed" in reason(made, "KV type")[1]
    by_hand = plan(b35, carded("RX 6700 XT"), Wishes(n_ctx=64000, kv_type="q8_0"))
    assert any("halve prompt speed" in warning for warning in by_hand.warnings)
    assert not term(by_hand, "f16 copy of one layer's cache")  # those kernels read quantized caches as they are


def test_measured_activations_decide_how_small_a_cache_may_be(b35: Facts) -> None:
    where, wishes = machine(12), Wishes(n_ctx=64000)
    keep = plan(b35, where, wishes, KVAdvice("f16", "f16", "keys have outliers in layer 3", ("measured on 64 texts",)))
    assert (keep.load.kv_type_k, keep.load.kv_type_v) == ("f16", "f16")
    assert "outliers in layer 3" in reason(keep, "KV type")[1]
    assert "measured on 64 texts" in keep.warnings
    mixed = plan(b35, where, wishes, KVAdvice("f16", "q4_0", "keys have outliers"))
    assert (mixed.load.kv_type_k, mixed.load.kv_type_v) == ("f16", "q8_0")
    free = plan(b35, where, wishes, KVAdvice("q8_0", "q4_0", "no outliers"))
    assert free.load.kv_type_k == "q8_0"
    against = plan(b35, where, replace(wishes, kv_type="q8_0"), KVAdvice("f16", "f16", "keys have outliers"))
    assert against.load.kv_type_k == "q8_0"
    assert any("below f16/f16: keys have outliers" in warning for warning in against.warnings)


def test_wide_keys_get_bf16(b35: Facts) -> None:
    made = plan(b35, machine(24), Wishes(n_ctx=64000), KVAdvice("bf16", "q8_0", "keys reach 80,000"))
    assert (made.load.kv_type_k, made.load.kv_type_v) == ("bf16", "f16")


# ---- context, checkpoints, drafts


def test_nobody_asked_for_a_length_so_a_shorter_one_is_taken_and_said(b35: Facts) -> None:
    where = machine(0, ram=22.6)
    made = plan(b35, where, Wishes())
    assert 2048 < made.load.n_ctx < 32768
    assert any("instead of 32,768" in warning for warning in made.warnings)
    assert "longest that fits" in reason(made, "context")[1]
    assert made.load.checkpoint_bytes >= b35.state_bytes  # a little of the length is given for them
    with pytest.raises(AnswerIsNo, match="does not fit"):  # asked for: refused, not shortened
        plan(b35, machine(0, ram=22.2), Wishes(n_ctx=32768))


def test_checkpoints_take_what_ram_can_spare(b35: Facts, tmp_path: Path) -> None:
    """P12: a fixed number of copies exceeds RAM. An eighth of what is left, 512 MiB at most, never the reserve."""
    roomy = plan(b35, machine(24, ram=64), Wishes(n_ctx=32768))
    assert roomy.load.checkpoint_bytes == 512 * MIB
    assert term(roomy, "checkpoints of recurrent state") == (8 + 1) * b35.state_bytes  # and the spare into which the engine copies
    tight = plan(b35, machine(12, ram=16), Wishes(n_ctx=262144))
    assert 0 < tight.load.checkpoint_bytes < 512 * MIB
    assert not tight.budgets[0].short
    asked = plan(b35, machine(24, ram=64), Wishes(checkpoint_bytes=2 * GIB))
    assert asked.load.checkpoint_bytes == 2 * GIB
    none = plan(b35, machine(24, ram=64), Wishes(checkpoint_bytes=0))
    assert none.load.checkpoint_bytes == 0
    assert any("read again from its start" in warning for warning in none.warnings)
    with pytest.raises(AnswerIsNo, match="RAM needs"):
        plan(b35, machine(24, ram=16), Wishes(checkpoint_bytes=64 * GIB))
    dense = read_facts(sparse_dense(tmp_path / "dense.gguf"))
    assert plan(dense, machine(8), Wishes()).load.checkpoint_bytes == 0
    assert any("no recurrent layers" in w for w in plan(dense, machine(8), Wishes(checkpoint_bytes=GIB)).warnings)


def test_drafts_are_counted_in_states_rows_and_a_second_context(mtp: Facts, b35: Facts) -> None:
    """P19: and beside experts in RAM they are warned about."""
    made = plan(mtp, machine(24), Wishes(n_ctx=32768, n_parallel=2, n_draft=3))
    assert (made.load.n_draft, made.load.load_mtp, made.load.n_outputs_max) == (3, True, 8)
    assert term(made, "recurrent state") == 8 * mtp.state_bytes
    assert term(made, "MTP block") == mtp.nextn[0].n_bytes
    assert term(made, "MTP context: KV cache") > 0
    assert made.warnings == ()
    small = plan(mtp, machine(12), Wishes(n_ctx=32768, n_draft=2))
    assert any("gain little or nothing" in warning for warning in small.warnings)
    lookup = plan(b35, machine(24), Wishes(n_draft=2))
    assert (lookup.load.n_draft, lookup.load.load_mtp) == (2, False)
    assert "no MTP block" in reason(lookup, "drafts")[1]
    with pytest.raises(UsageError, match="--draft: 99"):
        Wishes(n_draft=99)
    with pytest.raises(UsageError, match="--ubatch 32"):
        plan(b35, machine(24), Wishes(n_parallel=16, n_draft=3, n_ubatch=32))


def test_an_mtp_block_costs_nothing_unless_asked_for(mtp: Facts) -> None:
    without = plan(mtp, machine(24), Wishes(n_ctx=32768))
    assert not without.load.load_mtp
    assert not any("MTP" in each.name for each in without.terms)


# ---- by hand


@pytest.mark.parametrize("n_cpu_moe", [0, 5, 12, 13])
def test_a_margin_is_held_or_said_with_experts_by_hand(b35: Facts, n_cpu_moe: int) -> None:
    """P1: a placement by hand switches llama.cpp's own fitting off, and the load fails at the compute buffer."""
    try:
        made = plan(b35, machine(16), Wishes(n_ctx=64000, n_cpu_moe=n_cpu_moe))
    except AnswerIsNo as error:
        assert "leave --n-gpu-layers and --n-cpu-moe to the planner" in error.hint
        return
    assert made.load.cpu_expert_layers == tuple(range(n_cpu_moe))
    assert made.load.tensor_overrides == ()
    assert made.budgets[1].left >= GIB or any("stay free" in warning for warning in made.warnings)


def test_a_dense_model_has_no_experts_to_move(tmp_path: Path) -> None:
    dense = read_facts(sparse_dense(tmp_path / "dense.gguf"))
    made = plan(dense, machine(8), Wishes(n_cpu_moe=3))
    assert (made.load.cpu_expert_layers, made.load.n_ubatch, made.environment) == ((), 512, ())
    assert any("no routed experts" in warning for warning in made.warnings)


def test_a_full_card_is_kept_from_crawling(b35: Facts) -> None:
    """P11: Windows does not fail on a full card. P10: it may refuse pinned memory instead."""
    windows = replace(machine(8), system="Windows")
    made = plan(b35, windows, Wishes(n_ctx=64000, margin=256 * MIB))
    assert any("crawls" in warning for warning in made.warnings)
    assert any("GGML_CUDA_NO_PINNED=1" in warning for warning in made.warnings)
    assert not any("PINNED" in warning for warning in plan(b35, machine(8), Wishes(n_ctx=64000)).warnings)


def test_all_experts_are_counted_not_only_active_ones(b35: Facts) -> None:
    """P3: 3 billion active parameters do not make a 3 GB model; and only ten layers keep a cache."""
    made = plan(b35, machine(24), Wishes(n_ctx=65536, kv_type="f16"))
    assert term(made, "routed experts") == 40 * 432 * MIB
    assert term(made, "KV cache") == 1280 * MIB


def test_a_vision_encoder_is_counted(b35: Facts, tmp_path: Path) -> None:
    """P4."""
    from a3b_gguf.memory.facts import Projector

    seeing = replace(b35, projector=Projector(tmp_path / "mmproj.gguf", 900 * MIB, 1152, 4304, 8464))
    blind, made = plan(b35, machine(12), Wishes(n_ctx=64000)), plan(seeing, machine(12), Wishes(n_ctx=64000))
    assert term(made, "vision encoder") == 900 * MIB
    assert 100 * MIB < term(made, "vision encoder's buffer") < 1024 * MIB
    assert term_on_gpus(made) < term_on_gpus(blind) - 900 * MIB
    assert not any(budget.short for budget in made.budgets)


# ---- speed


def test_speed_follows_what_is_where(b35: Facts) -> None:
    plans = [plan(b35, machine(*vram), Wishes(n_ctx=64000)) for vram in ((), (8,), (12,), (16,), (24,))]
    decode = [made.speed.decode.middle for made in plans]
    assert decode == sorted(decode)
    for made in plans:
        speed = made.speed
        assert speed.decode.low < speed.decode.middle < speed.decode.high
        assert speed.decode_full.middle < speed.decode.middle
        assert speed.prefill.middle > speed.decode.middle
    fast_ram = plan(b35, replace(machine(8), ram_bandwidth=96e9), Wishes(n_ctx=64000))
    assert fast_ram.speed.decode.middle > 1.2 * plans[1].speed.decode.middle
    assert len(plans[1].speed.assumed) == 2
    assert carded_assumes(b35) == ()


def carded_assumes(b35: Facts) -> tuple[str, ...]:
    return plan(b35, replace(carded("RTX 3090"), ram_bandwidth=51.2e9), Wishes()).speed.assumed


def test_the_best_placement_is_found_again_from_any_draft(b35: Facts) -> None:
    """`best` does not depend on how the draft was arranged before."""
    from a3b_gguf.planner.draft import blank
    from a3b_gguf.planner.rules import context

    draft = context(blank(b35, machine(12), Wishes(n_ctx=16384)))
    first = best(draft)
    assert first is not None
    again = best(first)
    assert again is not None
    assert again.placement == first.placement


def test_a_small_vocabulary_needs_small_buffers(tmp_path: Path, b35: Facts) -> None:
    small = read_facts(sparse_35b(tmp_path / "small.gguf", "iq4_nl", SMALL_VOCAB))
    made, large = (plan(facts, machine(24), Wishes(n_ctx=8192)) for facts in (small, b35))
    assert term(made, "output buffer") < term(large, "output buffer")
