"""`--experts` and `--prune-experts`: what is left is the same model wherever the dropped experts were never chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.quantize import quantize_file
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.watch import Node, watching
from a3b_gguf.metadata import string, u32
from a3b_gguf.tensors import Model
from a3b_quantize.experts import prune_experts, pruned_imatrix, with_experts_used
from a3b_quantize.fit_imatrix import fit_imatrix
from command import assert_refused
from imatrix_files import made_up, values_of, write_dat
from inside import inside as a3b
from small_gguf import write_arrays

TOKENS = (300, 411, 57)
N_EXPERT, N_LAYER = 8, 4


def copy(*, bounds: bool = False, **more: Any) -> Options:
    return Options("copy", bounds=bounds, **more)


def drops(path: Path, table: dict[str, Sequence[int]]) -> Path:
    path.write_text("[drop]\n" + "".join(f'"{layer}" = {list(experts)}\n' for layer, experts in table.items()))
    return path


class Seen:
    """Observer that keeps the chosen experts and the logits."""

    def __init__(self) -> None:
        self.values: dict[str, NDArray[Any]] = {}

    def begin(self) -> None:
        pass

    def wants(self, node: Node) -> bool:
        return node.name.startswith("ffn_moe_topk-") or node.name == "result_output"

    def receive(self, node: Node) -> bool:
        found = node.values()
        assert found is not None
        self.values[node.name] = found
        return True


def run(path: Path) -> Seen:
    seen = Seen()
    with load_model(path, LoadParams(n_ctx=256)) as model, watching(model, 256, seen) as watch:
        watch.run(TOKENS)
    return seen


@pytest.fixture(scope="module")
def whole(tiny_bf16: Path) -> Seen:
    return run(tiny_bf16)


@pytest.fixture(scope="module")
def unchosen(whole: Seen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts of each layer that none of TOKENS chose; of the MTP block, which did not run, another two."""
    table: dict[str, Sequence[int]] = {"4": [6, 0]}
    for layer in range(N_LAYER):
        chosen = set(whole.values[f"ffn_moe_topk-{layer}"].reshape(-1).tolist())
        table[str(layer)] = [expert for expert in range(N_EXPERT) if expert not in chosen][:2]
    return drops(tmp_path_factory.mktemp("drops") / "drops.toml", table)


def test_logits_where_dropped_experts_were_never_chosen(tiny_bf16: Path, whole: Seen, unchosen: Path, tmp_path: Path) -> None:
    done = quantize_file(tiny_bf16, tmp_path / "pruned.gguf", copy(prune=unchosen))
    pruned = run(done.path)
    np.testing.assert_allclose(pruned.values["result_output"], whole.values["result_output"], rtol=1e-4, atol=1e-4)
    assert (pruned.values["ffn_moe_topk-0"] < N_EXPERT - 2).all()
    file = read_gguf(done.path)
    assert (file.hparam("expert_count"), file.hparam("expert_used_count")) == (6, 2)
    assert any("2 of 8 experts left out of each of 5 layers, 6 stay" in note for note in done.notes)


def test_other_experts_change_the_logits(tiny_bf16: Path, whole: Seen, tmp_path: Path) -> None:
    """So that the test above can fail: here the last token's own experts go."""
    table = {str(layer): whole.values[f"ffn_moe_topk-{layer}"].reshape(3, 2)[-1].tolist() for layer in range(N_LAYER)} | {"4": [0, 1]}
    done = quantize_file(tiny_bf16, tmp_path / "pruned.gguf", copy(prune=drops(tmp_path / "drops.toml", table)))
    assert np.abs(run(done.path).values["result_output"] - whole.values["result_output"]).max() > 0.1


def test_which_rows_stay(tiny_bf16: Path, unchosen: Path) -> None:
    """Every tensor of experts and the router lose the same experts, by a numpy of our own; all others stay as they are."""
    model = open_gguf_model(tiny_bf16)
    pruned = prune_experts(model, unchosen)
    after = {tensor.name: tensor for tensor in pruned.model.tensors}
    for tensor in model.tensors:
        rows = tensor.rows(0, int(np.prod(tensor.shape[:-1])))
        expected = rows.reshape(tensor.shape)
        if "_exps." in tensor.name or tensor.name.endswith("ffn_gate_inp.weight"):
            kept = pruned.kept[int(tensor.name.split(".")[1])]
            assert len(kept) == 6
            expected = expected[list(kept)]
        found = after[tensor.name]
        assert found.shape == expected.shape, tensor.name
        n_rows = int(np.prod(found.shape[:-1]))
        assert np.array_equal(found.rows(0, n_rows).reshape(found.shape), expected), tensor.name
        part = found.rows(n_rows // 3, n_rows // 2 + 1)
        assert np.array_equal(part, expected.reshape(n_rows, -1)[n_rows // 3 : n_rows // 2 + 1]), tensor.name


def test_vectors_of_experts(tmp_path: Path) -> None:
    """A router's bias has an expert in each column, a stack's bias in each row."""
    arrays = {
        "blk.0.ffn_up_exps.weight": np.arange(4 * 2 * 32, dtype=np.float32).reshape(4, 2, 32),
        "blk.0.ffn_up_exps.bias": np.arange(8, dtype=np.float32).reshape(4, 2),
        "blk.0.ffn_gate_inp.bias": np.arange(4, dtype=np.float32),
        "blk.0.exp_probs_b.bias": np.arange(4, dtype=np.float32) + 10,
    }
    metadata = {"general.architecture": string("qwen3moe"), "qwen3moe.block_count": u32(1), "qwen3moe.expert_count": u32(4)}
    source = write_arrays(tmp_path / "biased.gguf", arrays, metadata)
    done = quantize_file(source, tmp_path / "out.gguf", copy(prune=drops(tmp_path / "drops.toml", {"0": [2, 0]})))
    for tensor in open_gguf_model(done.path).tensors:
        rows = tensor.rows(0, int(np.prod(tensor.shape[:-1]))).reshape(tensor.shape)
        assert np.array_equal(rows, arrays[tensor.name][[1, 3]]), tensor.name


def test_pruning_while_quantizing(tiny_bf16: Path, unchosen: Path, tmp_path: Path) -> None:
    """In one pass the bytes are those of two."""
    copied = quantize_file(tiny_bf16, tmp_path / "copied.gguf", copy(prune=unchosen)).path
    two = quantize_file(copied, tmp_path / "two.gguf", Options("q8_0", bounds=False)).path
    one = quantize_file(tiny_bf16, tmp_path / "one.gguf", Options("q8_0", bounds=False, prune=unchosen)).path
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("legacy", [False, True])
def test_an_importance_matrix_is_pruned_too(tiny_bf16: Path, unchosen: Path, tmp_path: Path, legacy: bool) -> None:
    from a3b_quantize.imatrix import read_imatrix

    pruned = prune_experts(open_gguf_model(tiny_bf16), unchosen)
    imatrix = made_up(tiny_bf16)
    if legacy:
        imatrix = read_imatrix(write_dat(tmp_path / "imatrix.dat", values_of(imatrix)))
    fitted = fit_imatrix(pruned_imatrix(imatrix, pruned), pruned.model).imatrix
    name, kept = "blk.2.ffn_down_exps.weight", list(pruned.kept[2])
    assert np.array_equal(fitted.entries[name].sums, imatrix.entries[name].sums.reshape(8, -1)[kept])
    assert fitted.entries[name].counts.shape == (6,)
    again = fit_imatrix(pruned_imatrix(fitted, pruned), pruned.model).imatrix  # one of the pruned model is left alone
    assert np.array_equal(again.entries[name].sums, fitted.entries[name].sums)


def test_how_many_a_token_uses(tiny_bf16: Path, whole: Seen, tmp_path: Path) -> None:
    done = quantize_file(tiny_bf16, tmp_path / "one.gguf", copy(experts=3))
    assert run(done.path).values["ffn_moe_topk-1"].shape == (3, 3)
    assert read_gguf(done.path).hparam("expert_used_count") == 3
    assert "--experts: a token uses 3 of 8 experts; in the source 2" in done.notes


@pytest.mark.parametrize("count", [0, -1, 9])
def test_impossible_counts(tiny_bf16: Path, count: int) -> None:
    with pytest.raises(UsageError, match=f"a token can use 1 to 8 experts of this model, not {count}"):
        with_experts_used(open_gguf_model(tiny_bf16), count)


def test_models_without_experts(tmp_path: Path) -> None:
    model = open_gguf_model(write_arrays(tmp_path / "dense.gguf", {"blk.0.attn_q.weight": np.ones((2, 32), np.float32)}))
    with pytest.raises(UsageError, match="--experts: the model has no experts"):
        with_experts_used(model, 1)
    with pytest.raises(UsageError, match="--prune-experts: the model has no experts"):
        prune_experts(model, tmp_path / "drops.toml")


ALL = '"0-3" = [1]\n"4" = [1]'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold one table, drop"),
        ("[drop]", "must hold one table, drop"),
        (f"x = 1\n[drop]\n{ALL}", "must hold one table, drop"),
        ("[drop\n", "Expected"),
        ('[drop]\n"0" = 3', "drop '0' is 3, expected a list"),
        ('[drop]\n"0" = [true]', "drop '0' is [True], expected a list"),
        ('[drop]\n"0" = [8]', "drop '0': there is no expert 8, they are 0 to 7"),
        ('[drop]\n"0" = [-1]', "there is no expert -1"),
        ('[drop]\n"0" = [2, 2]', "expert 2 occurs twice"),
        ('[drop]\n"0-9" = [2]', "layers '0-9' are not in the model: the model has layers 0 to 3 and MTP behind them, up to 4"),
        ('[drop]\n"first" = [2]', "'first' are no layers"),
        ('[drop]\n"0-2" = [2]\n"2-4" = [1]', "layer 2 was named before"),
        ('[drop]\n"0-3" = [2]', "layer 0 would keep 7 experts and layer 4 8: the format has one expert_count"),
        ('[drop]\n"1-4" = [2]', "layer 1 would keep 7 experts and layer 0 8"),
    ],
)
def test_tables_that_cannot_be(tiny_bf16: Path, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "drops.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        prune_experts(open_gguf_model(tiny_bf16), path)
    assert said in caught.value.message


def test_too_few_would_stay(tiny_bf16: Path, tmp_path: Path) -> None:
    path = drops(tmp_path / "drops.toml", {"0-4": [0, 1, 2, 3, 4, 5, 6]})
    model = open_gguf_model(tiny_bf16)
    with pytest.raises(UsageError, match="1 experts would stay and a token uses 2") as caught:
        prune_experts(model, path)
    assert "--experts 1" in caught.value.hint
    done = quantize_file(tiny_bf16, tmp_path / "one.gguf", copy(prune=path, experts=1))
    assert np.isfinite(run(done.path).values["result_output"]).all()


def test_grouped_routers_are_refused(tiny_bf16: Path, tmp_path: Path) -> None:
    model = open_gguf_model(tiny_bf16)
    grouped = Model({**model.metadata, "qwen35moe.expert_group_count": u32(2)}, model.tensors)
    with pytest.raises(UsageError, match="among 2 groups of experts"):
        prune_experts(grouped, drops(tmp_path / "drops.toml", {"0-4": [0]}))


def test_json_and_the_mtp_block(tiny_bf16: Path, tmp_path: Path) -> None:
    """A JSON table of the trunk's layers, with the block left out."""
    (tmp_path / "drops.json").write_text('{"drop": {"first 2": [3], "-2--1": [5]}}')
    done = a3b("quantize", tiny_bf16, "--type", "copy", "--no-bounds", "--prune-experts", tmp_path / "drops.json", "--no-mtp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = read_gguf(tmp_path / "tiny-bf16-copy.gguf")
    assert (file.hparam("expert_count"), file.hparam("block_count")) == (7, 4)


def test_refusals_on_the_command_line(tiny_bf16: Path, tmp_path: Path) -> None:
    copying = ("quantize", tiny_bf16, "--type", "copy", "--no-bounds", "-o", tmp_path / "out.gguf")
    assert_refused(a3b(*copying, "--prune-experts", tmp_path / "no.toml"), 3, "no.toml: No such file", "[drop]")
    drops(tmp_path / "drops.toml", {"0-3": [0]})
    assert_refused(a3b(*copying, "--prune-experts", tmp_path / "drops.toml"), 3, "one expert_count", "--no-mtp")
    assert_refused(a3b(*copying, "--experts", 9), 2, "1 to 8 experts")
    assert [path.name for path in tmp_path.iterdir()] == ["drops.toml"]
