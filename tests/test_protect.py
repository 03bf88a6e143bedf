"""What measured ranges change: overflow-safe types, raised types where super experts are, advice for the KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.clip_bounds import Bounds, Header, Record, kv_advice, noise
from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_model import to_float32
from a3b_gguf.llama.ggml import quantize_chunk
from a3b_gguf.tensors import TYPES
from a3b_quantize.assign import Assignment
from a3b_quantize.bounds import record, write_bounds
from a3b_quantize.histogram import Histogram
from a3b_quantize.protect import limits, overflows, protected_types, standouts

HEADER = Header("m", "qwen35moe", "ab" * 32, "cd" * 32, 512, "text", "ef" * 32, {"a3b": "0.1.0"})
N_LAYERS = 6


def usual(layer: int, site: str, **changed: float) -> Record:
    return replace(Record(layer, site, -1, 1000, 0, 12.0, 0.5, 2.0, 4.0, 8.0, 40.0), **changed)  # type: ignore[arg-type]


def bounds(*changed: Record) -> Bounds:
    """Six ordinary layers, with some records replaced."""
    sites = ("attn_in", "k_cache", "v_cache", "attn_out_in", "ffn_in", "down_in", "down_out", "residual")
    found = {(layer, site): usual(layer, site) for layer in range(N_LAYERS) for site in sites}
    found |= {(each.layer, each.site): each for each in changed}
    return Bounds(HEADER, tuple(found.values()))


def assignment(name: str, kind: str, n_cols: int = 512, group_size: int = 32) -> Assignment:
    shape = (8, 64, n_cols) if "_exps" in name else (64, n_cols)
    return Assignment(name, shape, TYPES["bf16"], TYPES[kind], "role", "rule", group_size=group_size)


def types(assignments: list[Assignment], found: Bounds) -> dict[str, str]:
    return {each.name: each.type.name for each in protected_types(assignments, found)}


def test_ordinary_ranges_change_nothing() -> None:
    plain = [assignment(f"blk.{i}.{name}.weight", "q4_k") for i in range(N_LAYERS) for name in ("attn_q", "ffn_down_exps", "ffn_up_exps")]
    assert protected_types(plain, bounds()) == tuple(plain)


@pytest.mark.parametrize(("kind", "safe"), [("q4_k", "iq4_nl"), ("q5_k", "q5_0"), ("q4_0", "iq4_nl"), ("q4_1", "iq4_nl"), ("q5_1", "q5_0")])
def test_a_sum_that_overflows_gets_a_symmetric_type(kind: str, safe: str) -> None:
    hot = bounds(usual(2, "ffn_in", sum32=40_000.0))
    given = [assignment(f"blk.{layer}.ffn_{part}.weight", kind) for layer in (1, 2) for part in ("gate_exps", "up_shexp", "down_exps")]
    found = protected_types(given, hot)
    changed = {each.name: each.type.name for each, before in zip(found, given, strict=True) if each.type != before.type}
    assert changed == {"blk.2.ffn_gate_exps.weight": safe, "blk.2.ffn_up_shexp.weight": safe}
    assert all(each.nbytes <= before.nbytes for each, before in zip(found, given, strict=True))
    reason = next(each.reason for each in found if each.name == "blk.2.ffn_gate_exps.weight")
    assert reason == f"rule; {safe} instead of {kind}: a sum over 32 of ffn_in reaches 4e+04, and float16 ends at 65,504"


@pytest.mark.parametrize("kind", ["iq4_nl", "iq4_xs", "q6_k", "q8_0", "q3_k", "mxfp4"])
def test_symmetric_types_stay(kind: str) -> None:
    name = "blk.2.attn_q.weight"
    assert types([assignment(name, kind)], bounds(usual(2, "attn_in", sum32=1e9, absmax=1e9))) == {name: kind}


def test_which_site_a_weight_reads() -> None:
    """attn_qkv and attn_gate read ssm_in where the layer has state-space tensors, else attn_in."""
    hot = bounds(usual(0, "ssm_in", sum32=1e6), usual(1, "attn_in", sum32=1e6), usual(1, "attn_out_in", sum32=1e6))
    names = ["blk.0.attn_qkv", "blk.0.attn_gate", "blk.0.ssm_out", "blk.1.attn_qkv", "blk.1.attn_output", "blk.1.ffn_up", "output"]
    found = types([assignment(f"{name}.weight", "q4_k") for name in (*names, "blk.0.ssm_alpha")], hot)
    assert [name for name, kind in found.items() if kind == "iq4_nl"] == [
        "blk.0.attn_qkv.weight", "blk.0.attn_gate.weight", "blk.1.attn_qkv.weight", "blk.1.attn_output.weight", "blk.0.ssm_alpha.weight"
    ]  # fmt: skip


def test_the_shared_expert_goes_by_what_it_reads() -> None:
    """A record of down_in for the number after the last of 8 routed experts is the shared expert's."""
    given = [assignment(f"blk.2.ffn_down_{part}.weight", "q4_k") for part in ("exps", "shexp")]
    assert types(given, bounds()) == {"blk.2.ffn_down_exps.weight": "q4_k", "blk.2.ffn_down_shexp.weight": "q4_k"}
    found = bounds()
    for expert, safe in ((7, ("q4_k", "q4_k")), (8, ("q4_k", "iq4_nl"))):
        hot = replace(found, records=(*found.records, usual(2, "down_in", expert=expert, sum32=1e5)))
        assert tuple(types(given, hot).values()) == safe
    assert "a sum over 32 of down_in of the shared expert reaches 1e+05" in protected_types(given, hot)[1].reason


def test_what_an_allocation_is_asked_for() -> None:
    hot = bounds(usual(1, "down_out", absmax=1200.0), usual(2, "ffn_in", sum32=40_000.0), usual(3, "down_in", absmax=33_000.0))
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in (1, 2, 3) for part in ("down", "up")]
    found = limits([assignment(name, "iq4_nl") for name in names], hot)
    assert found.keys() == {"blk.1.ffn_down_exps.weight", "blk.2.ffn_up_exps.weight"}
    down, up = found.values()
    assert (down.floor, down.unsafe) == (TYPES["q5_k"], frozenset())
    assert [kind for kind in ("q4_k", "q5_0", "q5_k", "q8_0") if down.allows(TYPES[kind])] == ["q5_0", "q5_k", "q8_0"]
    assert up.floor is None
    assert [kind for kind in ("q2_k", "q3_k", "iq4_nl", "q4_k", "q5_k", "q6_k") if up.allows(TYPES[kind])] == ["q3_k", "iq4_nl", "q6_k"]


@pytest.mark.parametrize(("recipe", "floor"), [("q2_k", "q3_k"), ("q3_k", "iq4_xs"), ("q4_k", "q5_k"), ("q6_k", "q5_k"), ("q8_0", "q5_k")])
def test_the_floor_is_the_next_higher_type_but_at_most_q5_k(recipe: str, floor: str) -> None:
    special = bounds(usual(1, "down_out", absmax=1200.0))
    (found,) = limits([assignment("blk.1.ffn_down_exps.weight", recipe)], special).values()
    assert found.floor == TYPES[floor]


def test_float16_weights_become_bf16() -> None:
    hot = bounds(usual(3, "down_in", absmax=33_000.0), usual(4, "down_out", absmax=70_000.0))
    given = [assignment(f"blk.{layer}.ffn_down_exps.weight", "f16") for layer in (2, 3, 4)]
    assert types(given, hot) == {
        "blk.2.ffn_down_exps.weight": "f16", "blk.3.ffn_down_exps.weight": "bf16", "blk.4.ffn_down_exps.weight": "bf16"
    }  # fmt: skip


def test_what_an_overflow_does(tmp_path: Path) -> None:
    """The arithmetic of a Q8_1 product, with its float16 sum: an asymmetric type gives infinity, a symmetric one the right number."""
    rng = np.random.default_rng(0)
    activations = np.full(32, 2200.0, np.float32) + rng.standard_normal(32).astype(np.float32)
    seen = Histogram()
    seen.add(activations[None])
    weights = (rng.standard_normal((1, 32)) + 1).astype(np.float32)
    scale = np.abs(activations).max() / 127
    levels = np.round(activations / scale)
    with np.errstate(over="ignore"):
        block_sum = np.float16(scale * levels.sum())  # the s of block_q8_1

    def product(kind: str) -> float:
        stored = to_float32(quantize_chunk(TYPES[kind], weights, None).tobytes(), TYPES[kind])
        if kind != "q4_1":
            return float((stored * scale * levels).sum())
        least = stored.min()  # q4_1 is d * q + m, and m is multiplied by the block's sum
        return float(((stored - least) * scale * levels).sum() + np.float32(least) * np.float32(block_sum))

    exact = float(weights[0] @ activations)
    assert np.isinf(product("q4_1"))
    found = Bounds(HEADER, (record(0, "attn_in", -1, seen),))
    safe = protected_types([assignment("blk.0.attn_q.weight", "q4_1")], found)[0].type.name
    assert product(safe) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "n_cols", "higher"),
    [("iq4_nl", 512, "q5_k"), ("q4_k", 512, "q5_k"), ("q5_k", 512, "q6_k"), ("q6_k", 512, "q8_0"), ("q8_0", 512, "q8_0"),
     ("q3_k", 512, "iq4_xs"), ("iq4_nl", 96, "q5_1"), ("bf16", 512, "bf16")],
)  # fmt: skip
def test_layers_of_super_experts_get_a_higher_type(kind: str, n_cols: int, higher: str) -> None:
    special = bounds(usual(1, "down_out", absmax=1200.0))
    given = [assignment(f"blk.{layer}.ffn_{part}_exps.weight", kind, n_cols) for layer in (0, 1) for part in ("down", "up")]
    found = protected_types(given, special)
    assert [each.type.name for each in found] == [kind, kind, higher, kind]
    if higher != kind:
        assert "its output reaches 1,200, 100 times the median layer's (super experts)" in found[2].reason


def test_a_raised_type_is_made_safe_as_well() -> None:
    both = bounds(usual(1, "down_out", absmax=1200.0), usual(1, "down_in", sum32=1e5))
    given = [assignment("blk.1.ffn_down_exps.weight", "iq4_nl", group_size=64)]
    assert types(given, both) == {"blk.1.ffn_down_exps.weight": "q5_0"}
    assert protected_types(given, both)[0].group_size == 32


def test_what_stands_out() -> None:
    assert standouts(bounds()) == ()
    found = standouts(bounds(usual(1, "down_out", absmax=119.0), usual(4, "down_out", absmax=600.0)))
    assert [(each.layer, each.times) for each in found] == [(4, 50.0)]
    few = Bounds(HEADER, tuple(usual(layer, "down_out", absmax=10.0**layer) for layer in range(3)))
    assert standouts(few) == ()
    assert [(each.layer, each.site) for each in overflows(bounds(usual(5, "residual", sum32=40_000.0)))] == [(5, "residual")]


def of_values(site: str, values: NDArray[np.float32], layer: int = 0) -> Record:
    seen = Histogram()
    seen.add(values)
    return record(layer, site, -1, seen)


def advice(tmp_path: Path, keys: NDArray[np.float32], values: NDArray[np.float32]) -> tuple[str, str]:
    path = tmp_path / "clip_bounds.bin"
    write_bounds(path, HEADER, [of_values("k_cache", keys), of_values("v_cache", values)])
    found = kv_advice(path, HEADER.model_id)
    return found.k, found.v


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def outlier(times: float) -> NDArray[np.float32]:
    """Normal values, but for one channel of 128 that is larger."""
    values = normal(4096, 128)
    values[:, 7] *= np.float32(times)
    return values


def test_kv_advice(tmp_path: Path) -> None:
    assert advice(tmp_path, normal(512, 128), normal(512, 128)) == ("q8_0", "q4_0")
    assert advice(tmp_path, outlier(4), outlier(4)) == ("q8_0", "q8_0")
    assert advice(tmp_path, outlier(40), normal(512, 128)) == ("f16", "q4_0")
    assert advice(tmp_path, normal(512, 128), outlier(20_000)) == ("q8_0", "bf16")
    assert advice(tmp_path, np.zeros((4, 128), np.float32), normal(4, 128)) == ("q8_0", "q4_0")
    broken = normal(4, 128)
    broken[2, 3] = np.inf
    assert advice(tmp_path, broken, normal(4, 128)) == ("bf16", "q4_0")
    assert "1 keys of layer 0 were not finite" in kv_advice(tmp_path / "clip_bounds.bin", HEADER.model_id).why
    assert advice(tmp_path, np.zeros((4, 128), np.float32), normal(4, 128)) == ("q8_0", "q4_0")
    why = kv_advice(tmp_path / "clip_bounds.bin", HEADER.model_id).why
    assert "q8_0 would round keys of layer 0 by 0.0%" in why


@pytest.mark.parametrize("times", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_the_noise_that_advice_goes_by_is_the_rounding(kind: str, times: float) -> None:
    """Against ggml's own blocks: rms error of the channels that share a block with the outlier, over their deviation."""
    values = outlier(times)
    stored = to_float32(quantize_chunk(TYPES[kind], values, None).tobytes(), TYPES[kind]).reshape(values.shape)
    beside = [channel for channel in range(32) if channel != 7]
    real = np.sqrt(((stored - values)[:, beside] ** 2).mean()) / values[:, beside].std()
    assert 1.2 < noise(kind, of_values("k_cache", values)) / real < 1.8  # on the careful side


def test_advice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip_bounds.bin"
    write_bounds(path, HEADER, [of_values("k_cache", normal(4, 128))])
    with pytest.raises(BadInput, match="no ranges of the values in the cache"):
        kv_advice(path, HEADER.model_id)
    with pytest.raises(BadInput, match="was measured on another model: m"):
        kv_advice(path, "00" * 32)
