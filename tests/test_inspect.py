"""`a3b inspect`: numbers that add up, differences that are real, refusals that help."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import gguf
import pytest

from a3b_gguf.flows.inspect import differences, summarise
from command import assert_refused
from inside import inside as a3b
from true_header import sparse_35b


@pytest.fixture(scope="module")
def header_35b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_35b(tmp_path_factory.mktemp("sparse") / "35b.gguf", "iq4_nl", n_vocab=4096)


def test_sums_agree_with_gguf_py(tiny_bf16: Path) -> None:
    summary, theirs = summarise(tiny_bf16), gguf.GGUFReader(tiny_bf16)
    assert summary.n_tensors == len(theirs.tensors)
    assert summary.data_bytes == sum(t.n_bytes for t in theirs.tensors)
    assert summary.n_weights == sum(prod(int(n) for n in t.shape) for t in theirs.tensors)
    assert sum(row.n_bytes for row in summary.roles) == summary.data_bytes
    assert sum(row.n_tensors for row in summary.roles) == summary.n_tensors


def test_roles_of_the_35b(header_35b: Path) -> None:
    roles = {row.role: row for row in summarise(header_35b).roles}
    assert {role: row.n_tensors for role, row in roles.items()} == {
        "expert_gate": 40, "expert_up": 40, "expert_down": 40, "shared_expert": 120, "attention": 40, "deltanet": 90, "gates": 120,
        "router": 80, "conv": 30, "norm": 131, "embedding": 1, "output": 1,
    }  # fmt: skip
    # Research: routed experts hold 32.21 B weights, attn_qkv .503 B, attn_gate .252 B, ssm_out .252 B.
    assert sum(roles[f"expert_{part}"].n_weights for part in ("gate", "up", "down")) == 32_212_254_720
    assert roles["deltanet"].n_weights == 1_006_632_960


def test_the_mtp_block_is_a_role_of_its_own(tiny_bf16: Path) -> None:
    rows = summarise(tiny_bf16).tensors
    assert {row.name for row in rows if row.role == "mtp"} == {row.name for row in rows if row.name.startswith("blk.4.")} != set()


def test_text_and_json_show_the_same(header_35b: Path) -> None:
    text = a3b("inspect", header_35b)
    value = json.loads(a3b("inspect", header_35b, "--json").stdout)
    assert text.returncode == 0
    assert "qwen35moe, 733 tensors" in text.stdout
    assert "blk.0.attn_qkv.weight" not in text.stdout
    assert "blk.0.attn_qkv.weight" in a3b("inspect", header_35b, "--tensors").stdout
    assert value["n_tensors"] == 733 == len(value["tensors"])
    for row in value["roles"]:
        assert f"{row['n_weights']:,}" in text.stdout


def test_differences(header_35b: Path, tmp_path: Path) -> None:
    other = sparse_35b(tmp_path / "other.gguf", "bf16", n_vocab=4096)
    found = {d.what: (d.left, d.right) for d in differences(header_35b, other)}
    assert found["general.file_type"] == ("25", "32")
    assert found["blk.0.ffn_up_exps.weight"] == ("iq4_nl [256, 512, 2048]", "bf16 [256, 512, 2048]")
    assert "blk.0.attn_norm.weight" not in found
    assert a3b("inspect", header_35b, "--diff", other).returncode == 1
    assert a3b("inspect", header_35b, "--diff", header_35b).returncode == 0


def test_llama_cpp_stays_out(header_35b: Path) -> None:
    code = (
        f"import sys; sys.argv = ['a3b', 'inspect', {str(header_35b)!r}]; from a3b_gguf.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(str([m for m in ('numpy', 'gguf', 'llama_cpp') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"


def test_refusals(tmp_path: Path, tiny_bf16: Path) -> None:
    assert_refused(a3b("inspect", tmp_path / "none.gguf"), 3, "none.gguf", "No such file")
    (tmp_path / "page.gguf").write_text("<html>not found, and more than 24 bytes of it</html>")
    assert_refused(a3b("inspect", tmp_path / "page.gguf"), 3, "page.gguf is not a GGUF file")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_bf16.read_bytes()[:-1])
    assert_refused(a3b("inspect", cut), 3, "cut.gguf is cut off", "tensor")
    assert_refused(a3b("inspect"), 2, "Missing argument")
    for more in (("--json",), ("--tensors",), ("--diff", cut)):
        assert_refused(a3b("inspect", cut, "--card", *more), 2, "--card prints Markdown and nothing else")
    assert_refused(a3b("inspekt", cut), 2, "No such command")
