"""The door to llama.cpp: its log, loading with placement, the vocabulary, batches and samplers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as C

from a3b_gguf.errors import BadInput, MachineLacks, UsageError
from a3b_gguf.llama import buft_overrides
from a3b_gguf.llama.batch import Batch, decode, drop, last_position, logits
from a3b_gguf.llama.buffers import printed_buffers
from a3b_gguf.llama.load import Context, LoadedModel, load_model, open_context
from a3b_gguf.llama.log import CONT, DEBUG, ERROR, INFO, WARN, LlamaLog, LogLine
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.sampler import Sampler
from a3b_gguf.llama.sampling import Sampling
from a3b_gguf.llama.vocab import Vocab

PARAMS = LoadParams(n_ctx=512, n_seq_max=2, n_batch=128, n_ubatch=128, n_outputs_max=2)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with LlamaLog():
        yield


@pytest.fixture(scope="module")
def model(tiny_bf16: Path) -> Iterator[LoadedModel]:
    with load_model(tiny_bf16, PARAMS) as found:
        yield found


@pytest.fixture
def context(model: LoadedModel) -> Iterator[Context]:
    with open_context(model, PARAMS) as found:
        yield found


@pytest.fixture(scope="module")
def vocab(model: LoadedModel) -> Vocab:
    return Vocab(model)


def test_log_keeps_levels_joins_continuations_and_gives_the_callback_back() -> None:
    with LlamaLog() as outer:
        with LlamaLog() as inner:
            for level, text in ((INFO, b"one"), (CONT, b" line\n"), (ERROR, b"first\nsecond\n"), (DEBUG, b"detail\n"), (WARN, b"\xff\n")):
                inner._callback(level, text, None)
        assert inner.lines() == (
            LogLine(INFO, "one line"), LogLine(ERROR, "first"), LogLine(ERROR, "second"), LogLine(DEBUG, "detail"), LogLine(WARN, "�"),
        )  # fmt: skip
        assert inner.first_error() == "first"
        assert [line.text for line in inner.lines(WARN)] == ["first", "second", "�"]
        assert outer.lines() == ()


def test_log_of_an_inner_load_does_not_reach_the_outer(tiny_bf16: Path) -> None:
    with LlamaLog() as outer:
        with load_model(tiny_bf16, PARAMS, vocab_only=True) as loaded:
            assert any("vocab" in line.text for line in loaded.log)
            assert outer.lines() == ()
        with load_model(tiny_bf16, PARAMS) as loaded, open_context(loaded, PARAMS):
            pass  # freeing a context speaks, and by then the callback is the outer one's again
        assert outer.lines()


def test_load_tells_what_the_model_is(model: LoadedModel, context: Context) -> None:
    assert (model.n_layer, model.is_hybrid, model.n_moved) == (4, True, 0)
    assert model.n_ctx_train == 262144
    assert (context.n_ctx, context.n_ctx_seq) == (512, 512)


@pytest.mark.parametrize(
    ("layers", "mtp", "moved"), [((0, 2), False, 6), ((0, 1, 2, 3), False, 12), ((3, 4), True, 6), ((1, 4, 9), False, 3)]
)
def test_experts_go_to_the_cpu_and_the_log_proves_it(tiny_bf16: Path, layers: tuple[int, ...], mtp: bool, moved: int) -> None:
    with load_model(tiny_bf16, replace(PARAMS, cpu_expert_layers=layers, load_mtp=mtp)) as found:
        assert found.n_moved == moved


def test_a_placement_that_did_not_take_effect_is_an_error(tiny_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buft_overrides, "EXPERT_PATTERN", r"blk\.%d\.no_such_tensor")
    with pytest.raises(MachineLacks, match=r"layers \[0, 1\] should be in RAM, llama.cpp moved \{\}"):
        load_model(tiny_bf16, replace(PARAMS, cpu_expert_layers=(0, 1)))


def test_what_cannot_be_loaded_is_said_in_llama_cpps_words(tiny_bf16: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a file"):
        load_model(tmp_path, PARAMS)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_bf16.read_bytes()[:10_000_000])
    with pytest.raises(BadInput, match="not within the file bounds"):
        load_model(cut, PARAMS)
    text = tmp_path / "text.gguf"
    text.write_text("# no model")
    with pytest.raises(BadInput, match="invalid magic"):
        load_model(text, PARAMS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_type_k": "q3_k"}, "no KV cache type"),
        ({"n_outputs_max": 1}, "less than the 2 sequences"),
        ({"n_ubatch": 256}, "more than n_batch"),
        ({"kv_type_v": "q8_0", "flash_attn": False}, "needs flash attention"),
    ],
)
def test_parameters_that_would_end_the_process_are_refused(model: LoadedModel, change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_context(model, replace(PARAMS, **change))  # type: ignore[arg-type]


def test_a_context_beyond_memory_is_the_machines_fault(tiny_bf16: Path) -> None:
    code = f"""
import resource
from dataclasses import replace
from pathlib import Path
from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.params import LoadParams
params = LoadParams(n_ctx=1 << 20)  # 512 MiB of K and V
model = load_model(Path({str(tiny_bf16)!r}), params)
with open_context(model, replace(params, n_ctx=256)):
    pass  # what a context takes besides
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (400 << 20),) * 2)
try:
    open_context(model, params)
except MachineLacks as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("llama.cpp cannot open a context of 1,048,576 tokens on"), done.stderr
    assert "alloc" in done.stdout


@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q4_0", "iq4_nl"])
def test_kv_types_reach_the_cache(model: LoadedModel, kv_type: str) -> None:
    with open_context(model, replace(PARAMS, kv_type_k=kv_type, kv_type_v=kv_type)) as opened:
        assert any(f"K ({kv_type})" in line.text and f"V ({kv_type})" in line.text for line in opened.log)


def test_printed_buffers_add_up_to_the_models_size(model: LoadedModel, context: Context) -> None:
    buffers = printed_buffers((*model.log, *context.log))
    sizes = {kind: sum(b.n_bytes for b in buffers if b.kind == kind) for kind in ("model", "kv", "recurrent", "compute", "output")}
    # The MTP block is in the file and not loaded, and every mapped range is rounded up to pages.
    assert sizes["kv"] == 512 * 2 * (2 * 64) * 2
    assert 0 < sizes["model"] <= C.llama_model_size(model.pointer) * 1.1
    assert all(sizes.values())
    assert printed_buffers([LogLine(INFO, "load_tensors: CPU model buffer size =     0.00 MiB")]) == ()


def test_eval_callback_sees_the_graph(model: LoadedModel) -> None:
    asked = []

    def watch(address: int, ask: bool, _: object) -> bool:
        asked.append((address, ask))
        return False

    with open_context(model, PARAMS, watch) as opened:
        batch = Batch(4)
        batch.add(0, 0, [5, 6], 1)
        assert decode(opened, batch) == 0
    assert len(asked) > 100
    assert all(address and ask for address, ask in asked)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_tokens_give_the_text_back(vocab: Vocab, text: str) -> None:
    assert b"".join(map(vocab.piece, vocab.tokenize(text, False))) == text.encode()


def test_control_tokens_are_one_token_only_when_asked(vocab: Vocab) -> None:
    special = vocab.tokenize("<|im_start|>user", True)
    plain = vocab.tokenize("<|im_start|>user", False)
    assert special != plain
    assert [vocab.piece(token) for token in special] == [b"<|im_start|>", b"user"]
    assert b"".join(map(vocab.piece, plain)) == b"<|im_start|>user"
    assert vocab.is_eog(vocab.eos)
    assert vocab.piece(vocab.eos) == b"<|im_end|>"
    assert not vocab.is_eog(special[1])


def test_text_and_tokens_that_cannot_be(vocab: Vocab) -> None:
    with pytest.raises(BadInput, match="character 2 .* surrogate"):
        vocab.tokenize("ab\ud800", True)
    with pytest.raises(BadInput, match="outside the vocabulary"):
        vocab.piece(vocab.n_tokens)
    assert vocab.tokenize("", True) == []


def test_long_text_needs_no_second_guess(vocab: Vocab) -> None:
    text = "The capital of Chile. " * 2000
    assert b"".join(map(vocab.piece, vocab.tokenize(text, True))) == text.encode()


def test_another_thread_tokenizes_while_one_decodes(vocab: Vocab, context: Context) -> None:
    expected, got = vocab.tokenize("What is the capital of Chile?", True), list[list[int]]()
    thread = threading.Thread(target=lambda: got.extend(vocab.tokenize("What is the capital of Chile?", True) for _ in range(300)))
    thread.start()
    batch, at = Batch(128), 0
    while thread.is_alive() and at < 384:
        batch.clear()
        batch.add(0, at, expected[:4], 1)
        assert decode(context, batch) == 0
        at += 4
    thread.join()
    assert got == [expected] * 300


def test_a_batch_equals_the_same_rows_filled_one_by_one(vocab: Vocab, model: LoadedModel) -> None:
    tokens = vocab.tokenize("What is the capital of Chile?", True)
    with open_context(model, PARAMS) as ours, open_context(model, PARAMS) as theirs:
        batch = Batch(128)
        first, second = batch.add(0, 0, tokens, 1), batch.add(1, 0, tokens[::-1], 1)
        assert (len(batch), first, second) == (2 * len(tokens), len(tokens) - 1, 2 * len(tokens) - 1)
        assert decode(ours, batch) == 0
        other = C.llama_batch_init(128, 0, 1)
        rows = [(token, pos, 0) for pos, token in enumerate(tokens)] + [(token, pos, 1) for pos, token in enumerate(tokens[::-1])]
        for row, (token, pos, seq) in enumerate(rows):
            other.token[row], other.pos[row], other.n_seq_id[row], other.seq_id[row][0] = token, pos, 1, seq
            other.logits[row] = row in (first, second)
        other.n_tokens = 2 * len(tokens)
        assert C.llama_decode(theirs.pointer, other) == 0
        for row in (first, second):
            assert np.array_equal(logits(ours, row, vocab.n_tokens), logits(theirs, row, vocab.n_tokens))
        C.llama_batch_free(other)
        assert (last_position(ours, 0), last_position(ours, 1)) == (len(tokens) - 1, len(tokens) - 1)
        drop(ours, 0)
        assert (last_position(ours, 0), last_position(ours, 1)) == (-1, len(tokens) - 1)


def test_a_batch_never_holds_more_than_it_can() -> None:
    batch = Batch(4)
    batch.add(0, 0, [1, 2, 3], 3)
    assert batch.output.tolist() == [1, 1, 1, 0]
    for tokens, outputs in (([1, 2], 1), ([], 0), ([1], 2)):
        with pytest.raises(ValueError, match="do not fit"):
            batch.add(0, 3, tokens, outputs)
    assert len(batch) == 3


def test_a_refused_batch_changes_nothing(context: Context) -> None:
    batch = Batch(4)
    assert decode(context, batch) == -1
    batch.add(0, 0, [10**7], 1)
    assert decode(context, batch) == -1
    assert last_position(context, 0) == -1


def test_sampler_draws_what_its_chain_allows(vocab: Vocab, context: Context) -> None:
    batch = Batch(128)
    row = batch.add(0, 0, vocab.tokenize("<|im_start|>user\n", True), 1)
    assert decode(context, batch) == 0
    order = np.argsort(logits(context, row, vocab.n_tokens))[::-1]

    def draws(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1) -> list[int]:
        with Sampler(Sampling(2.0, top_k, top_p, min_p, seed), vocab, 512) as sampler:
            return [sampler.sample(context, row) for _ in range(60)]

    assert set(draws(top_k=1)) == {order[0]}
    assert set(draws(top_p=1e-6)) == set(draws(min_p=1.0)) == {order[0]}
    assert set(draws(top_k=5)) <= set(order[:5].tolist())
    assert len(set(draws())) > 5
    assert draws(seed=3) == draws(seed=3)
    assert draws(seed=3) != draws(seed=4)
