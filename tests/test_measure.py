"""What is measured while a model runs: every site, against the graph's own nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.watch import Node, watching
from a3b_gguf.metadata import Metadata, u32
from a3b_quantize.measure import measure
from a3b_quantize.sites import Sites, experts_by_layer, records
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
    for layer, site in product(range(4), ("down_in", "down_out")):
        experts = {each.expert: each for each in found.records if (each.layer, each.site) == (layer, site)}
        every, shared = experts.pop(-1), experts.pop(8, None)  # of 8 routed experts
        assert (shared is None) == (site == "down_out")
        assert shared is None or shared.count == n_tokens * 256
        assert sum(each.count for each in experts.values()) == every.count
        assert max(each.absmax for each in experts.values()) == every.absmax
        assert max(each.sum32 for each in experts.values()) == every.sum32
    for each in found.records:
        assert each.non_finite == 0
        assert 0 < each.p50 <= each.p99 <= each.p99_9 <= each.p99_99 <= each.absmax < each.sum32 * 32


class Kept:
    """Observer that keeps the values of the nodes with these names."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, list[NDArray[Any]]] = {name: [] for name in names}

    def begin(self) -> None:
        pass

    def wants(self, node: Node) -> bool:
        return node.name in self.values

    def receive(self, node: Node) -> bool:
        found = node.values()
        assert found is not None
        self.values[node.name].append(found)
        return True


def test_numbers_are_those_of_the_nodes(tiny_bf16: Path) -> None:
    """One layer's down_in, down_out and keys, collected by hand from the same run."""
    kept = Kept("ffn_moe_swiglu-2", "ffn_moe_down-2", "Kcur-3", "ffn_moe_topk-2", "ffn_swiglu-2")
    shapes = {info.name: info.shape for info in read_gguf(tiny_bf16).tensors}
    sites = Sites(shapes, experts_by_layer(shapes))
    tokens = list(range(300, 384))
    with load_model(tiny_bf16, LoadParams(n_ctx=256)) as model:
        for observer in (kept, sites):
            with watching(model, 256, observer, rows=64) as watch:  # two batches
                watch.run(tokens)
    chosen = np.concatenate(kept.values["ffn_moe_topk-2"])
    found = {(each.layer, each.site, each.expert): each for each in records(sites.histograms)}
    for node, site in (("ffn_moe_swiglu-2", "down_in"), ("ffn_moe_down-2", "down_out")):
        values = np.concatenate(kept.values[node])
        assert values.shape == (len(tokens), 2, 256)
        of_expert_3 = values[chosen == 3]
        assert found[2, site, -1].absmax == np.abs(values).max()
        assert found[2, site, 3].count == of_expert_3.size > 0
        assert found[2, site, 3].absmax == np.abs(of_expert_3).max()
    shared, before = np.concatenate(kept.values["ffn_swiglu-2"]), found[2, "down_in", 8]
    assert (before.absmax, before.count) == (np.abs(shared).max(), shared.size)
    assert before.sum32 == pytest.approx(np.abs(shared.reshape(len(tokens), -1, 32).sum(axis=-1)).max())
    after_rope = [values for values in kept.values["Kcur-3"] if values.ndim == 3]
    assert len(after_rope) == 2
    assert found[3, "k_cache", -1].absmax == max(np.abs(values).max() for values in after_rope)


def test_a_graph_may_end_early(tiny_bf16: Path) -> None:
    """Behind the node whose receiver says no, nothing is computed; the next batch starts afresh."""

    class Stops(Kept):
        def receive(self, node: Node) -> bool:
            super().receive(node)
            return node.name != "l_out-1"

    stops = Stops("l_out-0", "l_out-1", "l_out-2", "result_output")
    with load_model(tiny_bf16, LoadParams(n_ctx=256)) as model, watching(model, 256, stops, rows=32) as watch:
        watch.run(range(300, 364))
    assert {name: len(values) for name, values in stops.values.items()} == {"l_out-0": 2, "l_out-1": 2, "l_out-2": 0, "result_output": 0}


def test_a_failing_receiver_ends_the_run(tiny_bf16: Path) -> None:
    class Fails(Kept):
        def receive(self, node: Node) -> bool:
            raise KeyError(node.name)

    with (
        load_model(tiny_bf16, LoadParams(n_ctx=256)) as model,
        watching(model, 256, Fails("l_out-0", "l_out-1")) as watch,
        pytest.raises(KeyError, match="l_out-0"),
    ):
        watch.run([1, 2, 3])


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
