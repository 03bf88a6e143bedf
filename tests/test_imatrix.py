"""Importance matrices: read, written, fitted to a model, and refused by the name of the entry that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.quantize import plan_quantize, quantize_file
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.tensors import Model
from a3b_quantize.fit_imatrix import fit_imatrix
from a3b_quantize.imatrix import Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from a3b_quantize.importance import ImportanceOptions, importance_of
from command import assert_refused
from imatrix_files import made_up, values_of, write_dat
from inside import inside as a3b
from small_gguf import narrow, write_arrays

EXPERTS = "blk.0.ffn_gate_exps.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_bf16: Path) -> Path:
    return narrow(tiny_bf16, tmp_path_factory.mktemp("narrow") / "narrow-bf16.gguf", rows=8)


@pytest.fixture(scope="module")
def model(source: Path) -> Model:
    return open_gguf_model(source)


def same(left: Imatrix, right: Imatrix) -> bool:
    return (
        replace(left, entries={}) == replace(right, entries={})
        and left.entries.keys() == right.entries.keys()
        and all(
            np.array_equal(entry.sums, right.entries[name].sums) and np.array_equal(entry.counts, right.entries[name].counts)
            for name, entry in left.entries.items()
        )
    )


def changed(imatrix: Imatrix, name: str, change: Callable[[ImatrixEntry], ImatrixEntry]) -> Imatrix:
    return replace(imatrix, entries={**imatrix.entries, name: change(imatrix.entries[name])})


def test_it_comes_back_as_it_was_written(source: Path, tmp_path: Path) -> None:
    imatrix = made_up(source)
    n_bytes = write_imatrix(tmp_path / "imatrix.gguf", imatrix)
    assert n_bytes == (tmp_path / "imatrix.gguf").stat().st_size
    assert same(read_imatrix(tmp_path / "imatrix.gguf"), imatrix)
    assert [path.name for path in tmp_path.iterdir()] == ["imatrix.gguf"]


def test_gguf_py_reads_the_layout_of_llama_cpp(source: Path, tmp_path: Path) -> None:
    write_imatrix(tmp_path / "imatrix.gguf", made_up(source))
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix", "imatrix.datasets": ["calibration.txt", "more.txt"], "imatrix.chunk_count": 8,
        "imatrix.chunk_size": 512,
    }  # fmt: skip
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
    assert shapes[EXPERTS + ".in_sum2"] == (256, 8)
    assert shapes[EXPERTS + ".counts"] == (1, 8)
    assert shapes["blk.0.attn_qkv.weight.counts"] == (1, 1)
    assert [name.rsplit(".", 1)[0] for name in shapes] == sorted(name.rsplit(".", 1)[0] for name in shapes)


def test_plain_importance_is_llama_quantizes(source: Path, model: Model) -> None:
    imatrix = made_up(source)
    found = importance_of(imatrix, model, ImportanceOptions(plain=True))
    expected = values_of(imatrix)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert np.array_equal(values.reshape(-1), expected[name]), name
    assert found[EXPERTS].shape == (8, 256)
    assert (found[EXPERTS][1] == 1).all()  # the expert that was never used


def test_the_older_format(source: Path, model: Model, tmp_path: Path) -> None:
    """R32: values of all experts in one row, counts unknown."""
    values = values_of(made_up(source))
    imatrix = read_imatrix(write_dat(tmp_path / "imatrix.dat", values))
    assert (imatrix.is_legacy, imatrix.chunk_count, imatrix.chunk_size, imatrix.datasets) == (True, 8, 0, ("old.txt",))
    fitted = fit_imatrix(imatrix, model)
    assert fitted.imatrix.entries[EXPERTS].sums.shape == (8, 256)
    assert any("does not say how often each expert was used" in note for note in fitted.notes)
    for name, importance in importance_of(imatrix, model, ImportanceOptions(plain=True)).items():
        np.testing.assert_allclose(importance.reshape(-1), values[name], rtol=1e-6)


def test_an_older_file_without_its_last_part(source: Path, tmp_path: Path) -> None:
    path = write_dat(tmp_path / "imatrix.dat", values_of(made_up(source)), dataset="")
    path.write_bytes(path.read_bytes()[:-8])
    imatrix = read_imatrix(path)
    assert (imatrix.chunk_count, imatrix.datasets) == (0, ())


def test_fitting_twice_changes_nothing(source: Path, model: Model) -> None:
    once = fit_imatrix(made_up(source), model).imatrix
    assert same(fit_imatrix(once, model).imatrix, once)


def test_gate_and_up_of_one_tensor_serve_both(source: Path, model: Model) -> None:
    """R29: an imatrix of a fused model for split tensors, and the reverse."""
    imatrix = made_up(source)
    entries = dict(imatrix.entries)
    entries["blk.0.ffn_gate_up_exps.weight"] = entries.pop(EXPERTS)
    del entries["blk.0.ffn_up_exps.weight"]
    fitted = fit_imatrix(replace(imatrix, entries=entries), model).imatrix
    for name in (EXPERTS, "blk.0.ffn_up_exps.weight"):
        assert np.array_equal(fitted.entries[name].sums, imatrix.entries[EXPERTS].sums)


def test_split_entries_serve_a_fused_tensor(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "fused.gguf", {"blk.0.ffn_gate_up_exps.weight": np.ones((2, 4, 32), np.float32)})
    entry = ImatrixEntry(np.ones((2, 32), np.float32), np.ones(2, np.float32))
    imatrix = Imatrix({EXPERTS: entry, "blk.0.ffn_up_exps.weight": entry}, 512, 1, ())
    fitted = fit_imatrix(imatrix, open_gguf_model(path))
    assert list(fitted.imatrix.entries) == ["blk.0.ffn_gate_up_exps.weight"]


def test_what_is_said_about_partial_data(source: Path, model: Model) -> None:
    imatrix = made_up(source)
    imatrix = replace(imatrix, entries={**imatrix.entries, "blk.9.attn_q.weight": imatrix.entries["blk.0.attn_qkv.weight"]})
    notes = fit_imatrix(imatrix, model).notes
    assert "1 entries of the importance matrix belong to no tensor: blk.9.attn_q.weight" in notes
    assert any("15 entries have matrices that calibration never used" in note and "1 of 8" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: ImatrixEntry(e.sums[:, :-32], e.counts), f"entry {EXPERTS} of the importance matrix has 1792 values"),
        (lambda e: ImatrixEntry(e.sums[:4], e.counts[:4]), f"entry {EXPERTS} of the importance matrix has 1024 values"),
        (lambda e: ImatrixEntry(e.sums.reshape(4, -1), e.counts[:4]), f"entry {EXPERTS} of the importance matrix has 4 matrices"),
    ],
)
def test_another_shape_is_refused(source: Path, model: Model, change: Callable[[ImatrixEntry], ImatrixEntry], said: str) -> None:
    """R31: the imatrix of another model."""
    with pytest.raises(BadInput, match="importance matrix") as caught:
        fit_imatrix(changed(made_up(source), EXPERTS, change), model)
    assert said in caught.value.message
    assert "another model" in caught.value.hint


def test_embeddings_of_another_width_are_passed_over(source: Path, model: Model) -> None:
    """llama-quantize does so too: an entry for them comes from a model with another output."""
    entry = ImatrixEntry(np.ones((1, 32), np.float32), np.ones(1, np.float32))
    imatrix = made_up(source)
    fitted = fit_imatrix(replace(imatrix, entries={**imatrix.entries, "token_embd.weight": entry}), model)
    assert "token_embd.weight" not in fitted.imatrix.entries


def test_another_model_is_refused(model: Model) -> None:
    entry = ImatrixEntry(np.ones((1, 32), np.float32), np.ones(1, np.float32))
    with pytest.raises(BadInput, match=r"of another model: none of its 1 entries \(blk\.77\.attn_k\.weight\)"):
        fit_imatrix(Imatrix({"blk.77.attn_k.weight": entry}, 512, 1, ()), model)


def at(entry: ImatrixEntry, what: str, place: tuple[int, ...], value: float) -> ImatrixEntry:
    sums, counts = entry.sums.copy(), entry.counts.copy()
    (sums if what == "sums" else counts)[place] = value
    return ImatrixEntry(sums, counts)


@pytest.mark.parametrize(
    ("what", "place", "value", "said"),
    [
        ("sums", (3, 17), np.nan, "matrix 3, column 17: the sum is nan"),
        ("sums", (0, 0), np.inf, "matrix 0, column 0: the sum is inf"),
        ("sums", (7, 255), -1.0, "matrix 7, column 255: the sum is -1.0"),
        ("counts", (2,), -3.0, "matrix 2: the count is -3.0"),
        ("counts", (0,), np.nan, "matrix 0: the count is nan"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    source: Path, tmp_path: Path, what: str, place: tuple[int, ...], value: float, said: str
) -> None:
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, changed(made_up(source), EXPERTS, lambda entry: at(entry, what, place, value)))
    with pytest.raises(BadInput) as caught:
        read_imatrix(path)
    assert caught.value.message == f"{path}: entry {EXPERTS}, {said}"


def test_bad_numbers_in_an_older_file(source: Path, tmp_path: Path) -> None:
    values = values_of(made_up(source))
    values[EXPERTS] = values[EXPERTS].copy()
    values[EXPERTS][300] = np.nan
    with pytest.raises(BadInput, match=r"entry blk\.0\.ffn_gate_exps\.weight, matrix 0, column 300: the sum is nan"):
        read_imatrix(write_dat(tmp_path / "imatrix.dat", values))


@pytest.mark.parametrize("kind", ["gguf", "dat"])
def test_a_file_cut_off_anywhere_is_refused(source: Path, tmp_path: Path, kind: str) -> None:
    path, cut = tmp_path / f"imatrix.{kind}", tmp_path / f"cut.{kind}"
    if kind == "gguf":
        write_imatrix(path, made_up(source))
    else:
        write_dat(path, values_of(made_up(source)))
    data = path.read_bytes()
    ends = [0, 3, 7, 20, 100, 1000, len(data) // 2] + ([len(data) - 300] if kind == "gguf" else [len(data) - 1, len(data) - 9])
    for end in ends:
        cut.write_bytes(data[:end])
        with pytest.raises(BadInput):
            read_imatrix(cut)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>" * 9, "neither an imatrix.gguf nor an imatrix.dat"),
        (b"", "is cut off"),
        (b"\0" * 64, "neither an imatrix.gguf nor an imatrix.dat"),
        (b"\1\0\0\0\xff\xff\xff\xff" + b"\0" * 64, "name of -1 bytes"),
        (b"\1\0\0\0\2\0\0\0\xff\xfe" + b"\0" * 64, "not UTF-8"),
        (b"\1\0\0\0\1\0\0\0a\1\0\0\0\0\0\0\0" + b"\0" * 64, "entry a has 0 values"),
    ],
)
def test_what_is_no_importance_matrix(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "imatrix.dat").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_imatrix(tmp_path / "imatrix.dat")


def test_entries_that_are_not_whole(tmp_path: Path) -> None:
    def write(**arrays: NDArray[np.float32]) -> Path:
        return write_arrays(tmp_path / "x.gguf", {name.replace("_", ".", 1): values for name, values in arrays.items()})

    with pytest.raises(BadInput, match=r"entry a has no \.counts"):
        read_imatrix(write(a_in_sum2=np.ones((1, 32), np.float32)))
    with pytest.raises(BadInput, match=r"entry a has no \.in_sum2"):
        read_imatrix(write(a_counts=np.ones((1, 1), np.float32)))
    with pytest.raises(BadInput, match="entry a has 32 sums for 3 matrices"):
        read_imatrix(write(a_in_sum2=np.ones((1, 32), np.float32), a_counts=np.ones((3, 1), np.float32)))
    halves = write_arrays(
        tmp_path / "y.gguf", {"a.in_sum2": np.ones((1, 32), np.float32), "a.counts": np.ones((1, 1), np.float32)}, kind="f16"
    )
    with pytest.raises(BadInput, match=r"a\.in_sum2 is f16, expected f32"):
        read_imatrix(halves)
    with pytest.raises(BadInput, match="is a model, not an importance matrix"):
        read_imatrix(write(a=np.ones((1, 32), np.float32)))
    with pytest.raises(BadInput, match="No such file"):
        read_imatrix(tmp_path / "missing.gguf")


def test_notes_keys_and_digest_of_a_run(source: Path, tmp_path: Path) -> None:
    """What llama-quantize writes about the importance matrix stands in the file; the MTP block has no entries and that is said."""
    imatrix = made_up(source, mtp=False)
    write_imatrix(tmp_path / "imatrix.gguf", imatrix)
    done = quantize_file(source, tmp_path / "out.gguf", Options("iq4_nl", bounds=False, calibration=tmp_path))
    file = read_gguf(done.path)
    assert file.get("quantize.imatrix.file") == str(tmp_path / "imatrix.gguf")[:127]
    assert file.get("quantize.imatrix.dataset") == "calibration.txt"
    assert file.metadata["quantize.imatrix.entries_count"].kind == "u32"
    assert (file.get("quantize.imatrix.entries_count"), file.get("quantize.imatrix.chunks_count")) == (len(imatrix.entries), 8)
    assert any("does not run MTP blocks" in note for note in done.notes)
    without = quantize_file(source, tmp_path / "without.gguf", Options("iq4_nl", bounds=False))
    one, other = (
        {tensor.name: bytes(tensor.raw(0, 8)) for tensor in open_gguf_model(path).tensors if "_exps" in tensor.name}
        for path in (done.path, without.path)
    )
    assert all((one[name] == other[name]) == name.startswith("blk.4.") for name in one)


def test_unseen_experts_and_dead_channels_stay_alive(tmp_path: Path) -> None:
    """R27: no block of zeros, no NaN, and no more error than a fifth over that without importance."""
    values = np.random.default_rng(3).standard_normal((4, 64, 512)).astype(np.float32)
    source = write_arrays(tmp_path / "model.gguf", {"blk.0.ffn_up_exps.weight": values})
    sums = np.exp(np.random.default_rng(4).standard_normal((4, 512))).astype(np.float32)
    sums[0, :256] = 0  # channels that were never active
    counts = np.array([9, 0, 1, 500], np.float32)
    sums[1] = 0  # an expert that was never used
    imatrix = Imatrix({"blk.0.ffn_up_exps.weight": ImatrixEntry(sums * counts[:, None], counts)}, 512, 1, ())
    write_imatrix(tmp_path / "imatrix.gguf", imatrix)

    def error(kind: str, **more: object) -> list[float]:
        options = Options(kind, bounds=False, pure=True, **more)  # type: ignore[arg-type]
        done = quantize_file(source, tmp_path / "out.gguf", options)
        tensor = open_gguf_model(done.path).tensors[0]
        written = tensor.rows(0, 256).reshape(values.shape)
        assert np.isfinite(written).all()
        assert (np.abs(written).reshape(-1, 32).max(axis=1) > 0).all()
        return [float(each) for each in ((written - values) ** 2).mean(axis=(1, 2))]

    for kind in ("iq4_nl", "iq4_xs", "q4_k"):
        unweighted, weighted = error(kind), error(kind, imatrix=tmp_path / "imatrix.gguf")
        assert weighted[1] < 1.2 * unweighted[1], kind
        assert all(one < 2 * other for one, other in zip(weighted, unweighted, strict=True)), kind


def test_an_expert_that_never_got_anything(tmp_path: Path) -> None:
    """Used, but with zeros only: also types that need importance are written, and the others keep their bytes."""
    values = np.random.default_rng(3).standard_normal((2, 4, 256)).astype(np.float32)
    source = write_arrays(tmp_path / "model.gguf", {EXPERTS: values})
    sums = np.ones((2, 256), np.float32)
    sums[1] = 0
    write_imatrix(tmp_path / "imatrix.gguf", Imatrix({EXPERTS: ImatrixEntry(sums, np.ones(2, np.float32))}, 512, 1, ()))
    done = quantize_file(source, tmp_path / "out.gguf", Options("iq2_xxs", stock=True, bounds=False, calibration=tmp_path))
    written = open_gguf_model(done.path).tensors[0].rows(0, 8)
    assert 0 < ((written - values.reshape(8, 256)) ** 2).mean() < 0.2


def test_refusals_on_the_command_line(source: Path, tmp_path: Path) -> None:
    quantize = ("quantize", source, "--type", "iq4_nl", "-o", tmp_path / "out.gguf")
    assert_refused(a3b(*quantize, "--imatrix", tmp_path / "no.gguf"), 3, "no.gguf: No such file", "imatrix.gguf or an imatrix.dat")
    assert_refused(a3b(*quantize, "--imatrix", source), 3, "is a model, not an importance matrix")
    assert_refused(a3b(*quantize, "--calibration", tmp_path), 2, "holds no imatrix.gguf", "a3b calibrate")
    write_imatrix(tmp_path / "imatrix.gguf", changed(made_up(source), EXPERTS, lambda entry: at(entry, "sums", (1, 5), np.nan)))
    assert_refused(a3b(*quantize, "--calibration", tmp_path), 3, f"entry {EXPERTS}, matrix 1, column 5: the sum is nan")
    both = a3b(*quantize, "--calibration", tmp_path, "--imatrix", tmp_path / "imatrix.gguf")
    assert_refused(both, 2, "--imatrix and --calibration name two")
    write_imatrix(tmp_path / "imatrix.gguf", made_up(source))
    assert_refused(a3b(*quantize[:4], "--calibration", tmp_path, "-o", tmp_path / "imatrix.gguf"), 2, "is the input")
    assert [path.name for path in tmp_path.iterdir()] == ["imatrix.gguf"]


def test_low_bit_types_ask_for_entries(source: Path, tmp_path: Path) -> None:
    """As with llama-quantize, a tensor without an entry is no reason to write garbage."""
    write_imatrix(tmp_path / "imatrix.gguf", made_up(source, mtp=False))
    options = Options("iq2_xxs", stock=True, bounds=False, imatrix=tmp_path / "imatrix.gguf")
    with pytest.raises(UsageError, match=r"blk\.4\.\S+ would become iq2_xxs, which is garbage without importance, and the matrix has none"):
        plan_quantize(source, tmp_path / "out.gguf", options)
    assert plan_quantize(source, tmp_path / "out.gguf", replace(options, mtp=False)).nbytes
