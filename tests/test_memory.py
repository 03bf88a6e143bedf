"""Facts and memory terms, held against what others measured: published logs of llama.cpp, and its own allocator asked here."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.errors import BadInput
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.flows.quantize import Options, quantize_file
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_write import header
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.machine import Device
from a3b_gguf.memory.facts import Facts
from a3b_gguf.memory.placement import HOST, Placement, place
from a3b_gguf.memory.read import facts_of
from a3b_gguf.memory.settings import Settings, padded
from a3b_gguf.memory.terms import all_terms
from a3b_gguf.metadata import Metadata, array, string, u32
from a3b_gguf.tensors import TYPES, TensorJob
from a3b_gguf.units import GIB, MIB
from dry_run import dry_run, dry_runs
from kin_headers import SMALL_VOCAB, sparse_30b, sparse_80b, sparse_dense
from true_header import empty, metadata_35b, sparse_35b, tensors_35b, type_of

GPU = Device("CUDA0", 12 * GIB, 11 * GIB)
CARD = "CUDA0"


@pytest.fixture(scope="session")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sparse files by name; "35b" has the true vocabulary, the others a small one, which llama.cpp reads faster."""
    folder = tmp_path_factory.mktemp("headers")
    return {
        "35b": sparse_35b(folder / "35b.gguf", "iq4_nl"),
        "35b-small": sparse_35b(folder / "35b-small.gguf", "iq4_nl", SMALL_VOCAB),
        "30b": sparse_30b(folder / "30b.gguf"),
        "80b": sparse_80b(folder / "80b.gguf"),
        "dense": sparse_dense(folder / "dense.gguf"),
    }


@pytest.fixture(scope="session")
def b35(headers: dict[str, Path]) -> Facts:
    return read_facts(headers["35b"])


Sizes = dict[tuple[str, str], float]


def sizes(facts: Facts, settings: Settings, placement: Placement | None = None, gpus: tuple[Device, ...] = ()) -> Sizes:
    """(term, device) -> MiB."""
    placement = placement or place(facts.n_layer_all, (), 0)
    return {(term.name, term.device): term.n_bytes / MIB for term in all_terms(facts, gpus, placement, settings)}


# Published allocator logs and readings, MiB. (id and link, model, n_ctx asked, K, V, slots) -> KV cache, recurrent state
PUBLISHED = [
    ("https://github.com/ggml-org/llama.cpp/pull/22673 real load", "35b", 131072, "f16", "f16", 1, 2560.00, 62.81),
    ("RTX 3060 Vulkan b10284, 2 slots", "35b", 65536, "f16", "f16", 2, 1280.00, 125.62),
    ("RTX 3060 Vulkan b10284, 4 slots", "35b", 65536, "f16", "f16", 4, 1280.00, 251.25),
    ("Vulkan, 9427632224 B on the card", "35b", 54784, "f16", "f16", 1, 1070.00, 62.81),
    ("Qwen3.6-35B-A3B at 64,000", "35b", 64000, "f16", "f16", 1, 1250.00, 62.81),
    ("same", "35b", 64000, "q8_0", "q8_0", 1, 664.06, 62.81),
    ("same", "35b", 64000, "q8_0", "q4_0", 1, 507.81, 62.81),
    ("same", "35b", 64000, "q4_0", "q4_0", 1, 351.56, 62.81),
    ("same", "35b", 262144, "f16", "f16", 1, 5120.00, 62.81),
    ("same", "35b", 262144, "q8_0", "q8_0", 1, 2720.00, 62.81),
    ("llama.cpp tools/fit-params/README.md", "30b", 4096, "f16", "f16", 1, 384.00, 0.0),
    ("Qwen3-30B-A3B, q8_0", "30b", 32768, "q8_0", "q8_0", 1, 1632.00, 0.0),
]


@pytest.mark.parametrize(("source", "model", "n_ctx", "k", "v", "slots", "kv", "recurrent"), PUBLISHED)
def test_published_cache_and_state(
    headers: dict[str, Path], b35: Facts, source: str, model: str, n_ctx: int, k: str, v: str, slots: int, kv: float, recurrent: float
) -> None:
    found = sizes(b35 if model == "35b" else read_facts(headers[model]), Settings(padded(n_ctx), slots, kv_type_k=k, kv_type_v=v))
    assert round(found["KV cache", HOST], 2) == kv
    assert round(found.get(("recurrent state", HOST), 0), 2) == recurrent


def test_published_sum_of_cache_and_state(b35: Facts) -> None:
    """RTX 2000 Ada, https://github.com/ggml-org/llama.cpp/pull/22673: context 2622 MiB, and with q8_0 at 150,000 of issue 23527."""
    on_card = place(b35.n_layer_all, (GPU,), 99)
    found = sizes(b35, Settings(131072), on_card, (GPU,))
    assert int(found["KV cache", CARD] + found["recurrent state", CARD]) == 2622
    found = sizes(b35, Settings(padded(150000), kv_type_k="q8_0", kv_type_v="q8_0"), on_card, (GPU,))
    assert round(found["KV cache", CARD], 1) == 1556.6


def test_published_compute_buffers(b35: Facts) -> None:
    """Logs of a build that reserved logits for every row, then of the build with both fixes (issue 23527, ubatch 4096).

    These builds kept f16 copies of the cache in a pool and no results of experts, which is what a Vulkan card still does.
    """
    old = Device("Vulkan0", 12 * GIB, 11 * GIB)
    on_card = place(b35.n_layer_all, (old,), 99)
    found = sizes(b35, Settings(54784, n_outputs_max=512), on_card, (old,))
    assert found["compute buffer", old.name] == pytest.approx(493.00, rel=0.01)
    assert found["compute buffer", HOST] == pytest.approx(61.52, abs=0.005)
    assert sizes(b35, Settings(54784), on_card, (old,))["output buffer", HOST] == pytest.approx(0.95, abs=0.005)

    all_in_ram = on_card.with_cpu_experts(range(40))
    # That file keeps down_proj in q6_k: 210 MiB a tensor.
    experts = (("ffn_gate_exps", 144 * MIB), ("ffn_up_exps", 144 * MIB), ("ffn_down_exps", 210 * MIB))
    q6_down = replace(b35, layers=tuple(replace(layer, expert_tensors=experts) for layer in b35.layers))
    found = sizes(q6_down, Settings(150016, n_ubatch=4096, kv_type_k="q8_0", kv_type_v="q8_0"), all_in_ram, (old,))
    assert found["compute buffer", HOST] == pytest.approx(1236.0, abs=0.5)
    assert found["compute buffer", old.name] + found["staging of experts", old.name] == pytest.approx(1982, rel=0.002)
    many = sizes(b35, Settings(150016, n_ubatch=4096, n_outputs_max=4096), all_in_ram, (old,))
    assert many["compute buffer", old.name] + many.get(("staging of experts", old.name), 0) == pytest.approx(3976, rel=0.02)


# model, n_ctx, n_ubatch, slots, K and V
ASKED = [
    ("35b", 64000, 512, 1, "q8_0"),
    ("35b-small", 8192, 2048, 1, "f16"),
    ("35b-small", 65536, 512, 4, "q4_0"),
    ("35b-small", 262144, 512, 1, "q8_0"),
    ("30b", 65536, 512, 4, "q8_0"),
    ("80b", 8192, 512, 16, "f16"),
    ("80b", 65536, 2048, 1, "q4_0"),
    ("dense", 8192, 512, 2, "q8_0"),
    ("tiny", 4096, 512, 1, "f16"),
    ("tiny", 262144, 512, 4, "q8_0"),
    ("tiny", 256, 256, 1, "f32"),
]


def load_params(n_ctx: int, n_ubatch: int, slots: int, kv: str) -> LoadParams:
    return LoadParams(
        n_ctx, slots, n_batch=n_ubatch, n_ubatch=n_ubatch, n_outputs_max=slots, kv_type_k=kv, kv_type_v=kv, n_threads=2, n_threads_batch=2
    )


@pytest.fixture(scope="module")
def allocated(headers: dict[str, Path], tiny_bf16: Path) -> dict[tuple[object, ...], dict[str, float]]:
    """What llama.cpp allocates for each row of ASKED; a process opens a model once for all its rows."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for model in dict.fromkeys(asked[0] for asked in ASKED):
        rows = [asked for asked in ASKED if asked[0] == model]
        runs = dry_runs(headers.get(model, tiny_bf16), [load_params(*row[1:]) for row in rows])
        found |= dict(zip(rows, runs, strict=True))
    return found


@pytest.mark.parametrize("asked", ASKED)
def test_llama_cpp_allocates_the_same(
    headers: dict[str, Path], tiny_bf16: Path, allocated: dict[tuple[object, ...], dict[str, float]], asked: tuple[str, int, int, int, str]
) -> None:
    """Every buffer of the context, to the printed 0.01 MiB. The whole grid is in benchmarks/bench_plan.py."""
    model, n_ctx, n_ubatch, slots, kv = asked
    real = allocated[asked]
    found = sizes(read_facts(headers.get(model, tiny_bf16)), Settings(n_ctx, slots, n_ubatch, slots, kv, kv))
    for name, term in (("kv", "KV cache"), ("recurrent", "recurrent state"), ("output", "output buffer")):
        assert found.get((term, HOST), 0) == pytest.approx(real[name], abs=0.00501), term
    assert found["compute buffer", HOST] == pytest.approx(real["compute"], abs=0.00501)
    assert real["n_ctx"] == n_ctx


@pytest.mark.parametrize("n_ctx", [1, 255, 256, 257, 64000, 64001])
def test_contexts_are_padded_like_llama_cpp_does(tiny_bf16: Path, n_ctx: int) -> None:
    if n_ctx in (1, 257):
        assert dry_run(tiny_bf16, LoadParams(n_ctx))["n_ctx"] == padded(n_ctx)
    assert padded(n_ctx) % 256 == 0
    assert 0 <= padded(n_ctx) - n_ctx < 256


def test_weights_are_those_that_llama_cpp_loads(tiny_bf16: Path) -> None:
    """The MTP block is not loaded; the mapped range may begin or end with a little of something else."""
    facts = read_facts(tiny_bf16)
    real = dry_run(tiny_bf16, LoadParams(4096, use_mmap=False), real=True)
    assert facts.weight_bytes / MIB == pytest.approx(real["model"], abs=0.02)
    assert sum(layer.n_bytes for layer in facts.nextn) > MIB
    terms = sizes(facts, Settings(4096))
    names = ("token embedding", "routed experts", "attention, dense and norms", "output")
    assert sum(terms[name, HOST] for name in names) == pytest.approx(facts.weight_bytes / MIB)


def test_repacked_bytes_are_those_that_llama_cpp_repacks(tiny_bf16: Path, tmp_path: Path) -> None:
    path = quantize_file(tiny_bf16, tmp_path / "tiny-iq4_nl.gguf", Options("iq4_nl", stock=True, kernel="fast", bounds=False)).path
    facts = read_facts(path)
    real = dry_run(path, LoadParams(4096), real=True)
    assert sum(layer.repacked for layer in facts.layers) / MIB == pytest.approx(real["repacked"], abs=0.05)
    mapped, read = sizes(facts, Settings(4096)), sizes(facts, Settings(4096, use_mmap=False))
    assert mapped["copy repacked for the CPU", HOST] == pytest.approx(real["repacked"], abs=0.05)
    assert ("copy repacked for the CPU", HOST) not in read


def test_a_split_over_gpus_is_llama_cpps_own(b35: Facts) -> None:
    """By free memory, the output counted as a layer; the token embedding stays in RAM."""
    gpus = (Device("CUDA0", 24 * GIB, 20 * GIB), Device("CUDA1", 12 * GIB, 10 * GIB))
    both = place(40, gpus, 41)
    assert both.layers == ("CUDA0",) * 28 + ("CUDA1",) * 12  # 41 * 2/3 = 27.3
    assert both.output == "CUDA1"
    assert place(40, gpus, 1).layers == (HOST,) * 40
    assert place(40, gpus, 1).output == "CUDA0"
    half = place(40, gpus, 21)
    assert half.layers == (HOST,) * 20 + ("CUDA0",) * 14 + ("CUDA1",) * 6
    found = sizes(b35, Settings(8192), both, gpus)
    assert found["token embedding", HOST] == b35.embedding_bytes / MIB
    assert found["KV cache", "CUDA0"] == pytest.approx(160 * 7 / 10)


def test_experts_in_ram_move_their_bytes_and_nothing_else(b35: Facts) -> None:
    all_there = place(40, (GPU,), 41)
    moved = all_there.with_cpu_experts((0, 1, 2, 99))
    assert moved.cpu_experts == (0, 1, 2)
    before, after = sizes(b35, Settings(8192), all_there, (GPU,)), sizes(b35, Settings(8192), moved, (GPU,))
    assert after["routed experts", HOST] == 3 * b35.layers[0].experts / MIB == 3 * 432
    assert before["routed experts", CARD] - after["routed experts", CARD] == 3 * 432
    assert 100 < after["staging of experts", CARD] < 2 * 144  # one tensor is copied at a time, in part into what is free then
    same = ("KV cache", "recurrent state", "attention, dense and norms", "output")
    assert all(before[name, CARD] == after[name, CARD] for name in same)


def test_a_tied_output_is_loaded_twice_on_a_gpu(headers: dict[str, Path]) -> None:
    facts = read_facts(headers["dense"])
    assert facts.output_bytes == 0
    found = sizes(facts, Settings(1024), place(30, (GPU,), 31), (GPU,))
    assert found["output", CARD] == (facts.embedding_bytes + facts.other_bytes) / MIB
    assert sizes(facts, Settings(1024))["output", HOST] == facts.other_bytes / MIB


def test_facts_of_the_family(headers: dict[str, Path], b35: Facts) -> None:
    assert (b35.n_layer, b35.n_attention, b35.n_recurrent, b35.n_expert, b35.n_expert_used) == (40, 10, 30, 256, 8)
    assert [i for i, layer in enumerate(b35.layers) if not layer.recurrent] == list(range(3, 40, 4))
    assert b35.weight_bytes == sum(tensor.nbytes for tensor in read_gguf(headers["35b"]).tensors)
    assert b35.expert_bytes == 40 * 3 * 256 * 512 * 2048 * 18 // 32
    assert b35.active_bytes < b35.weight_bytes / 7
    for name, attention, recurrent in (("30b", 48, 0), ("80b", 12, 36), ("dense", 30, 0)):
        facts = read_facts(headers[name])
        assert (facts.n_attention, facts.n_recurrent, facts.notes) == (attention, recurrent, ())


def test_an_unknown_architecture_says_what_is_not_known(tmp_path: Path) -> None:
    def as_gemma(metadata: Metadata) -> None:
        for key in [key for key in metadata if key.startswith("qwen35moe.")]:
            metadata["gemma3" + key[9:]] = metadata.pop(key)
        metadata["general.architecture"] = string("gemma3")
        metadata["gemma3.attention.sliding_window"] = u32(1024)
        metadata["gemma3.attention.kv_lora_rank"] = u32(512)

    notes = " ".join(read_facts(changed(tmp_path, as_gemma)).notes)
    assert all(word in notes for word in ("gemma3", "sliding-window", "latent attention", "recurrent state"))


def changed(folder: Path, change: Callable[[Metadata], None], drop: str = "never") -> Path:
    """The 35B's header with other metadata, without the tensors whose name starts with `drop`, as a sparse file."""
    metadata = metadata_35b(SMALL_VOCAB, 25)
    change(metadata)
    tensors = [(name, shape) for name, shape in tensors_35b(SMALL_VOCAB) if not name.startswith(drop)]
    jobs = [TensorJob(name, shape, type_of(name, "iq4_nl"), empty) for name, shape in tensors]
    path = folder / "changed.gguf"
    with path.open("wb") as out:
        out.write(header(metadata, jobs)[0])
        out.truncate(1 << 35)
    return path


def test_an_mtp_block_that_is_only_promised_is_refused(tmp_path: Path) -> None:
    """The breakage that llama.cpp reports as "missing tensor blk.40.attn_norm" (its issue 23033)."""

    def promise(metadata: Metadata) -> None:
        metadata["qwen35moe.block_count"], metadata["qwen35moe.nextn_predict_layers"] = u32(41), u32(1)
        metadata["qwen35moe.attention.recurrent_layers"] = array("bool", [(i + 1) % 4 != 0 and i < 40 for i in range(41)])

    with pytest.raises(BadInput, match=r"nextn_predict_layers is 1 and block_count 41, but the file has no tensor blk\.40\.\*") as caught:
        read_facts(changed(tmp_path, promise))
    assert "--no-mtp" in caught.value.hint


def put(key: str, value: object) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value  # type: ignore[assignment]

    return change


@pytest.mark.parametrize(
    ("key", "value", "drop", "says"),
    [
        ("qwen35moe.block_count", None, "never", "qwen35moe.block_count is missing"),
        ("qwen35moe.block_count", u32(0), "never", "block_count is 0, expected a whole number from 1"),
        ("qwen35moe.block_count", string("40"), "never", "block_count is '40', expected a whole number"),
        ("qwen35moe.block_count", u32(39), "never", r"block_count is 39, but there are tensors blk\.39\.\*"),
        ("qwen35moe.context_length", u32(262144), "blk.17.", r"block_count is 40, but there is no tensor blk\.17\.\*"),
        ("qwen35moe.nextn_predict_layers", u32(40), "never", "40 MTP blocks of 40 blocks"),
        ("qwen35moe.attention.recurrent_layers", array("bool", [True] * 40), "never", "calls layer 3 a DeltaNet layer"),
        ("qwen35moe.attention.recurrent_layers", array("bool", [True] * 3), "never", "has 3 values, the model 40 layers"),
        ("qwen35moe.attention.head_count_kv", array("str", ["a"] * 40), "never", "holds something that is no count"),
        ("general.architecture", None, "never", "general.architecture is missing"),
        ("general.type", string("imatrix"), "never", "of type 'imatrix', not a model"),
        ("general.architecture", string("clip"), "never", "of type 'mmproj', not a model"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object, drop: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_facts(changed(tmp_path, put(key, value), drop))


def test_parts_of_a_split_model_are_read_together(headers: dict[str, Path], tmp_path: Path) -> None:
    whole = read_gguf(headers["dense"])
    metadata: Metadata = {**read_gguf(headers["dense"], arrays=True).metadata, "split.count": u32(2)}
    parts = [whole.tensors[:100], whole.tensors[100:]]
    for i, tensors in enumerate(parts, 1):
        jobs = [TensorJob(tensor.name, tensor.shape, tensor.type, empty) for tensor in tensors]
        with (tmp_path / f"m-{i:05d}-of-00002.gguf").open("wb") as out:
            out.write(header(metadata if i == 1 else {"split.count": u32(2)}, jobs)[0])
            out.truncate(1 << 30)
    first = tmp_path / "m-00001-of-00002.gguf"
    assert replace(read_facts(first), path=whole.path) == facts_of(whole)
    with pytest.raises(BadInput, match="part 2 of 2") as caught:
        read_facts(tmp_path / "m-00002-of-00002.gguf")
    assert "m-00001-of-00002.gguf" in caught.value.hint
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(BadInput, match="m-00002-of-00002.gguf"):
        read_facts(first)
    first.rename(tmp_path / "odd.gguf")
    with pytest.raises(BadInput, match="one of 2 parts"):
        read_facts(tmp_path / "odd.gguf")


def test_types_have_their_bytes() -> None:
    """Bytes of one cached element, as llama.cpp's cache is sized."""
    per_element = {name: TYPES[name].block_bytes / TYPES[name].block for name in ("f16", "q8_0", "q5_0", "q4_0", "iq4_nl")}
    assert per_element == {"f16": 2, "q8_0": 34 / 32, "q5_0": 22 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32}


def test_a_damaged_header_is_never_a_traceback(headers: dict[str, Path], tmp_path: Path) -> None:
    """Bytes of metadata and tensor names changed at random: facts come out, or BadInput does."""
    file = read_gguf(headers["dense"])
    with headers["dense"].open("rb") as source:
        whole = source.read(file.data_offset)
    spots = [match.start() for match in re.finditer(rb"llama\.|general\.|blk\.", whole)]
    chance, path, refused = random.Random(1), tmp_path / "damaged.gguf", 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[chance.choice(spots) + chance.randrange(60)] = chance.choice((0, 255, chance.randrange(256)))
        path.write_bytes(damaged)
        os.truncate(path, file.file_size)
        try:
            read_facts(path)
        except BadInput:
            refused += 1
    assert 50 < refused < 150
