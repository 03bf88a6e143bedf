"""models.toml and its loader: every entry's numbers agree with each other, and a typo is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from a3b_gguf import catalog
from a3b_gguf.catalog import ModelEntry
from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.flows.plan import read_facts
from inside import inside as a3b

ROOT = Path(__file__).parent.parent
GOOD = '[[model]]\nname = "a"\narchitecture = "qwen3moe"\n'


def weights_of(e: ModelEntry) -> float:
    """Weights of the trunk by its dimensions, in billions: the published total must agree with it."""
    assert e.n_layer
    assert e.n_embd
    assert e.n_head
    assert e.n_head_kv
    assert e.head_dim
    assert e.n_expert
    assert e.n_ff_expert
    assert e.n_vocab
    hybrid = e.full_attention_interval is not None
    attention = e.n_embd * e.head_dim * (e.n_head * (3 if hybrid else 2) + 2 * e.n_head_kv)
    moe = 3 * e.n_embd * (e.n_expert * e.n_ff_expert + (e.n_ff_shared or 0)) + e.n_embd * e.n_expert
    n_attention = e.n_layer // (e.full_attention_interval or 1)
    inner = (e.ssm_state_size or 0) * (e.ssm_time_step_rank or 0)
    keys = 2 * (e.ssm_state_size or 0) * (e.ssm_group_count or 0)
    linear = e.n_embd * (3 * inner + keys + 2 * (e.ssm_time_step_rank or 0))
    return (n_attention * attention + (e.n_layer - n_attention) * linear + e.n_layer * moe + 2 * e.n_vocab * e.n_embd) / 1e9


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_published_totals_follow_from_the_dimensions(entry: ModelEntry) -> None:
    assert entry.parameters == pytest.approx(weights_of(entry), rel=0.02)


def test_tiny_a3b_is_what_its_file_says(tiny_bf16: Path) -> None:
    entry, facts = catalog.get("tiny"), read_facts(tiny_bf16)
    assert (entry.n_layer, entry.n_layer_nextn) == (facts.n_layer, len(facts.nextn))
    assert (entry.n_embd, entry.n_vocab, entry.n_ctx, entry.head_dim) == (facts.n_embd, facts.n_vocab, facts.n_ctx_train, facts.k_dim)
    assert (entry.n_expert, entry.n_expert_used, entry.n_ff_expert) == (facts.n_expert, facts.n_expert_used, facts.n_ff_expert)
    assert entry.folder
    assert (ROOT / entry.folder).is_dir()


def test_a_model_is_found_by_name_and_by_alias_in_any_case() -> None:
    assert catalog.get("qwen3.6-35b-A3B").name == catalog.get("QWEN3.6").name == "Qwen3.6-35B-A3B"


def test_an_unknown_name_gets_its_neighbours() -> None:
    with pytest.raises(UsageError, match="no model 'qwen36'") as caught:
        catalog.get("qwen36")
    assert "Qwen3.6-35B-A3B" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        (GOOD + "n_layr = 3", r"model 1 \(a\): unknown key n_layr", "did you mean n_layer"),
        (GOOD + 'n_layer = "3"', r"n_layer is '3', expected a whole number from 1", ""),
        (GOOD + "n_layer = 0", r"n_layer is 0, expected a whole number from 1", ""),
        (GOOD + "n_layer = true", r"n_layer is True, expected a whole number", ""),
        (GOOD + 'aliases = "b"', r"aliases is 'b', expected a list of strings", ""),
        (GOOD + GOOD.replace('"a"', '"A"'), r"A is a name of a and of A", ""),
        (GOOD + 'aliases = ["a"]', r"a is a name of a and of a", ""),
        ('[[model]]\nname = "a"\n', r"model 1 \(a\): key architecture is missing", ""),
        ("[[model]\n", r"models\.toml: ", "correct the file"),
        ("[models]\nx = 1\n", r"nothing else, found models", ""),
        ("model = 3\n", r"found model as a value", ""),
    ],
)
def test_a_wrong_file_is_refused_with_place_and_key(tmp_path: Path, text: str, says: str, hint: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=says) as caught:
        catalog.entries(file)
    assert str(file) in caught.value.message
    assert hint in caught.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        catalog.entries(tmp_path / "models.toml")


def test_it_is_found_beside_the_package_too(tmp_path: Path) -> None:
    """A wheel has models.toml inside the package; an editable install one folder up."""
    package = tmp_path / "a3b_gguf"
    package.mkdir()
    for name in ("__init__.py", "catalog.py", "errors.py"):
        shutil.copy(ROOT / "a3b_gguf" / name, package)
    (package / "models.toml").write_text(GOOD)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from a3b_gguf import catalog; print([e.name for e in catalog.entries()])"
    assert subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True).stdout.strip() == "['a']"


def test_models_command() -> None:
    assert "Qwen3-Coder-Next" in a3b("models").stdout
    assert [entry["name"] for entry in json.loads(a3b("models", "list", "--json").stdout)] == [e.name for e in catalog.entries()]
    assert json.loads(a3b("models", "show", "qwen3.6", "--json").stdout)["n_expert"] == 256
    assert "Qwen/Qwen3.6-35B-A3B" in a3b("models", "show", "qwen3.6").stdout
    for wrong in (("models", "show"), ("models", "lst"), ("models", "list", "qwen3.6"), ("models", "show", "nothing")):
        done = a3b(*wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
