"""Compute buffers by replaying llama.cpp's allocator: its rules one by one, then its own numbers for drafts and MTP contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.flows.plan import read_facts
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.memory.allocate import Allocator, Graph, Tensor, peaks
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.graph import model_peaks
from a3b_gguf.memory.placement import place
from a3b_gguf.memory.settings import Settings
from a3b_gguf.memory.terms import all_terms
from a3b_gguf.memory.widths import widths_of
from a3b_gguf.units import MIB
from dry_run import dry_run, dry_runs
from kin_headers import sparse_30b, sparse_35b_mtp


@pytest.fixture(scope="module")
def mtp_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_35b_mtp(tmp_path_factory.mktemp("graph") / "35b-mtp.gguf")


@pytest.fixture(scope="module")
def b35(mtp_file: Path) -> Facts:
    return read_facts(mtp_file)


# ---- the allocator's rules


def test_places_are_aligned_and_the_smallest_hole_is_taken() -> None:
    buffer = Allocator(32)
    at = [buffer.take(size) for size in (100, 40, 10, 64, 1)]
    assert at == [0, 128, 192, 224, 288]
    buffer.give_back(at[0], 100)
    buffer.give_back(at[2], 10)
    assert buffer.take(32) == 192  # not the larger hole at 0
    assert buffer.take(64) == 0
    assert buffer.peak == 320


def test_neighbouring_holes_become_one() -> None:
    buffer = Allocator(32)
    at = [buffer.take(32) for _ in range(4)]
    for i in (0, 2, 1):
        buffer.give_back(at[i], 32)
    assert buffer.free[0] == [0, 96]
    buffer.give_back(at[3], 32)
    assert len(buffer.free) == 1
    assert buffer.take(128) == 0
    assert buffer.peak == 128


def run(*tensors: Tensor, gpu: bool = False) -> tuple[int, int]:
    graph = Graph()
    for tensor in tensors:
        graph.expand(tensor)
    found = peaks(graph, gpu)
    return found.host, found.device


def test_a_source_is_written_over_only_when_nobody_else_needs_it() -> None:
    def chain(reuses: bool, other_user: bool, layout: str = "same") -> int:
        made = Tensor(64, (Tensor(0, kind="kept"),), "same")
        result = Tensor(64, (made,), layout, reuses=reuses)
        last = [Tensor(64, (made, result), "same")] if other_user else []
        return run(result, *last)[0]

    assert chain(reuses=False, other_user=False) == 2 * 64
    assert chain(reuses=True, other_user=False) == 64
    assert chain(reuses=True, other_user=True) == 3 * 64
    assert chain(reuses=True, other_user=False, layout="other") == 2 * 64


def test_a_view_keeps_what_it_looks_into() -> None:
    made = Tensor(64, (Tensor(0, kind="kept"),))
    view = Tensor(0, (made,), root=made)
    other = Tensor(64, (Tensor(0, kind="kept"),))
    last = Tensor(64, (other, view))
    assert run(view, other, last)[0] == 3 * 64


def test_a_gpu_gets_copies_of_inputs_and_of_one_weight_at_a_time() -> None:
    """Two weights in RAM, one after the other: the second copy takes the place of the first."""
    start = Tensor(128, kind="input")
    first = Tensor(128, (Tensor(1024, kind="copied"), start))
    second = Tensor(128, (Tensor(1024, kind="copied"), first))
    host, device = run(second, gpu=True)
    assert host == 128
    assert device == 128 + 1024 + 128  # the input's copy, a weight's copy, and the first result; the second finds room


# ---- llama.cpp's own numbers

ASKED = [
    (4096, 512, 1, 0, "f16"), (4096, 512, 4, 2, "q8_0"), (65536, 2048, 1, 2, "q8_0"), (65536, 512, 4, 0, "q4_0"),
    (262144, 512, 1, 1, "f16"), (16384, 1024, 2, 3, "q8_0"),
]  # fmt: skip


def test_drafts_and_their_context_are_llama_cpps_to_the_printed_digit(mtp_file: Path, b35: Facts) -> None:
    loads = [
        LoadParams(n_ctx, slots, rows, rows, slots * (1 + drafts), kv_type_k=kv, kv_type_v=kv, n_draft=drafts, load_mtp=True)
        for n_ctx, rows, slots, drafts, kv in ASKED
    ]
    for load, real in zip(loads, dry_runs(mtp_file, loads), strict=True):
        kinds = (load.kv_type_k, load.kv_type_v)
        settings = Settings(load.n_ctx, load.n_seq_max, load.n_ubatch, load.n_outputs_max, *kinds, n_draft=load.n_draft, load_mtp=True)
        found = {term.name: term.n_bytes / MIB for term in all_terms(b35, (), place(b35.n_layer_all, (), 0), settings)}
        pairs = {
            "KV cache": "kv", "recurrent state": "recurrent", "compute buffer": "compute", "MTP context: KV cache": "mtp kv",
            "MTP context: compute buffer": "mtp compute", "MTP context: output buffer": "mtp output",
        }  # fmt: skip
        for name, key in pairs.items():
            assert found[name] == pytest.approx(real[key], abs=0.00501), (load, name)


def test_scores_without_flash_attention_are_llama_cpps_to_the_printed_digit(mtp_file: Path, b35: Facts, tmp_path: Path) -> None:
    b30 = sparse_30b(tmp_path / "30b.gguf")
    for path, facts, drafts in ((mtp_file, b35, 2), (b30, read_facts(b30), 0)):
        loads = [
            LoadParams(
                n_ctx, slots, rows, rows, slots * (1 + n), kv_type_k=k, kv_unified=shared, n_draft=n, load_mtp=n > 0, flash_attn=False
            )
            for n_ctx, rows, slots, shared, n, k in (
                (1024, 128, 4, False, drafts, "f16"), (1024, 512, 4, True, drafts, "f16"), (4096, 256, 1, True, 0, "f16"),
                (32768, 256, 1, True, drafts, "q8_0"), (65536, 512, 4, False, drafts, "f16"),
            )
        ]  # fmt: skip
        for load in loads:
            real = dry_run(path, load)
            kinds = (load.kv_type_k, load.kv_type_v, load.kv_unified)
            settings = Settings(load.n_ctx, load.n_seq_max, load.n_ubatch, load.n_outputs_max, *kinds, n_draft=load.n_draft)
            settings = replace(settings, load_mtp=load.load_mtp, flash_attn=False)
            terms = all_terms(facts, (), place(facts.n_layer_all, (), 0), settings)
            found = {term.name: term.n_bytes / MIB for term in terms}
            assert found["KV cache"] == pytest.approx(real["kv"], abs=0.00501)
            assert found["compute buffer"] == pytest.approx(real["compute"], abs=0.00501), load
            assert found.get("MTP context: compute buffer", 0) == pytest.approx(real.get("mtp compute", 0), abs=0.00501), load
            seen = load.n_ctx if load.kv_unified else load.n_ctx // load.n_seq_max
            assert found["attention scores as V is"] == 2 * seen * load.n_ubatch * facts.n_head / MIB


def test_a_few_layers_stand_for_all(b35: Facts, tmp_path: Path) -> None:
    """What the search replays is what the whole model gives, within 64 KiB."""
    for facts in (b35, read_facts(sparse_30b(tmp_path / "30b.gguf"))):
        for settings in (Settings(4096), Settings(65536, 4, 2048, 4, "q8_0", "q8_0"), Settings(65536, 1, 512, 3, n_draft=2)):
            experts = facts.layers[0].expert_tensors
            for gpu, in_ram in ((False, ()), (True, ()), (True, experts), (True, experts[:1])):
                few, whole = (model_peaks(widths_of(facts, settings, facts.layers, n), gpu, in_ram) for n in (False, True))
                assert few.host == whole.host
                assert abs(whole.device - few.device) <= 1 << 16


def test_drafts_cost_states_outputs_and_a_context_of_their_own(b35: Facts) -> None:
    def terms(n_draft: int) -> dict[str, int]:
        settings = Settings(8192, 2, n_outputs_max=2 * (1 + n_draft), n_draft=n_draft, load_mtp=n_draft > 0)
        return {term.name: term.n_bytes for term in all_terms(b35, (), place(b35.n_layer_all, (), 0), settings)}

    without, drafting = terms(0), terms(3)
    assert drafting["recurrent state"] == 4 * without["recurrent state"]
    assert drafting["output buffer"] == 4 * without["output buffer"]
    assert drafting["MTP block"] == b35.nextn[0].n_bytes
    assert drafting["MTP context: KV cache"] * 10 == drafting["KV cache"]
    assert not any(name.startswith("MTP") for name in without)
