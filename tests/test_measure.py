"""What is measured while a model runs: every site, against the graph's own nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.watch import N_BATCH, watch
from a3b_gguf.metadata import Metadata, u32
from a3b_quantize.bounds import record
from a3b_quantize.measure import measure
from a3b_quantize.sites import Collector
from small_gguf import llama_metadata, write_arrays


def test_every_site_of_the_embedded_model(tiny_bf16: Path) -> None:
    found = measure(tiny_bf16)
    seen = {(each.layer, each.site) for each in found.records}
    attention = {(3, site) for site in ("attn_in", "k_cache", "v_cache", "attn_out_in")}
    delta_net = {(layer, site) for layer in (0, 1, 2) for site in ("ssm_in", "ssm_out_in")}
    assert seen == attention | delta_net | {(i, site) for i in range(4) for site in ("ffn_in", "down_in", "down_out", "residual")}
    n_tokens, count = found.header.tokens, {(each.layer, each.site, each.expert): each.count for each in found.records}
    assert count[3, "k_cache", -1] == count[3, "v_cache", -1] == n_tokens * 128
    assert count[0, "residual", -1] == count[3, "residual", -1] == n_tokens * 256
    assert count[1, "down_in", -1] == count[1, "down_out", -1] == n_tokens * 2 * 256
    for layer in range(4):
        experts = {each.expert: each for each in found.records if (each.layer, each.site) == (layer, "down_in")}
        every = experts.pop(-1)
        assert sum(each.count for each in experts.values()) == every.count
        assert max(each.absmax for each in experts.values()) == every.absmax
        assert max(each.sum32 for each in experts.values()) == every.sum32
    for each in found.records:
        assert each.non_finite == 0
        assert 0 < each.p50 <= each.p99 <= each.p99_9 <= each.p99_99 <= each.absmax < each.sum32 * 32


def test_numbers_are_those_of_the_nodes(tiny_bf16: Path) -> None:
    """One layer's down_in and keys, collected by hand from the same run."""
    rows: dict[str, list[NDArray[np.float32]]] = {"ffn_moe_swiglu-2": [], "Kcur-3": []}
    chosen: list[NDArray[np.int32]] = []

    def receive(name: str, values: NDArray[np.float32]) -> None:
        (chosen if name == "ffn_moe_topk-2" else rows[name]).append(values)  # type: ignore[arg-type]

    file = read_gguf(tiny_bf16)
    collector = Collector(info.name for info in file.tensors)
    tokens = list(range(300, 300 + N_BATCH + 20))  # two batches
    with load_model(tiny_bf16, LoadParams(n_ctx=256)) as model:
        watch(model, tokens, lambda name: name in ("ffn_moe_topk-2", *rows), receive)
        watch(model, tokens, collector.wanted, collector.receive)
    activations = np.concatenate(rows["ffn_moe_swiglu-2"])
    assert activations.shape == (len(tokens), 2, 256)
    of_expert_3 = activations[np.concatenate(chosen) == 3]
    found = {(layer, site, expert): record(layer, site, expert, seen) for layer, site, expert, seen in collector.ordered()}
    assert found[2, "down_in", -1].absmax == np.abs(activations).max()
    assert found[2, "down_in", 3].count == of_expert_3.size > 0
    assert found[2, "down_in", 3].absmax == np.abs(of_expert_3).max()
    after_rope = [values for values in rows["Kcur-3"] if values.ndim == 3]
    assert len(after_rope) == 2
    assert found[3, "k_cache", -1].absmax == max(np.abs(values).max() for values in after_rope)


def test_a_failing_receiver_ends_the_run(tiny_bf16: Path) -> None:
    def receive(name: str, values: NDArray[np.float32]) -> None:
        raise KeyError(name)

    with load_model(tiny_bf16, LoadParams(n_ctx=256)) as model, pytest.raises(KeyError, match="l_out-0"):
        watch(model, [1, 2, 3], lambda name: name.startswith("l_out"), receive)


def random_llama(path: Path, tiny_bf16: Path, experts: int) -> Path:
    """One layer of a random llama or qwen3moe with the embedded model's vocabulary."""
    tokenizer = {key: value for key, value in open_gguf_model(tiny_bf16).metadata.items() if key.startswith("tokenizer.")}
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / 8).astype(np.float32)

    arrays = {name: np.ones(64, np.float32) for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")}
    arrays |= {f"blk.0.attn_{part}.weight": matrix(64, 64) for part in ("q", "k", "v", "output")} | {"token_embd.weight": matrix(4096, 64)}
    metadata: Metadata = {**llama_metadata(), **tokenizer}
    if experts:
        arrays |= {f"blk.0.attn_{part}_norm.weight": np.ones(32, np.float32) for part in ("q", "k")}
        arrays |= {f"blk.0.ffn_{part}_exps.weight": matrix(experts, 64, 64) for part in ("gate", "up", "down")}
        arrays |= {"blk.0.ffn_gate_inp.weight": matrix(experts, 64)}
        own = {key.removeprefix("llama."): value for key, value in llama_metadata().items() if key.startswith("llama.")}
        own |= {"expert_count": u32(experts), "expert_used_count": u32(2), "expert_feed_forward_length": u32(64)}
        own |= {"attention.key_length": u32(32), "attention.value_length": u32(32)}
        metadata = {"general.architecture": replace(metadata["general.architecture"], value="qwen3moe"), **tokenizer}
        metadata |= {f"qwen3moe.{key}": value for key, value in own.items()}
    else:
        arrays |= {f"blk.0.ffn_{part}.weight": matrix(64, 64) for part in ("gate", "up", "down")}
    return write_arrays(path, arrays, metadata)


@pytest.mark.parametrize("experts", [0, 4])
def test_other_architectures(tiny_bf16: Path, tmp_path: Path, experts: int) -> None:
    found = measure(random_llama(tmp_path / "small.gguf", tiny_bf16, experts))
    assert {each.site for each in found.records} == {
        "attn_in", "k_cache", "v_cache", "attn_out_in", "ffn_in", "down_in", "down_out", "residual"
    }  # fmt: skip
    assert {each.expert for each in found.records if each.site == "down_in"} == {-1, *range(experts)}
    assert {each.count for each in found.records if each.site == "residual"} == {found.header.tokens * 64}
