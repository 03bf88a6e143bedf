"""A plan in other forms: commands of other programs held against their own words, a figure, a table of contexts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from a3b_gguf import gpus
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.machine import Machine, with_gpus, with_ram
from a3b_gguf.memory.facts import Facts
from a3b_gguf.planner.decide import plan
from a3b_gguf.planner.plan import Plan, Wishes
from a3b_gguf.planner.table import table
from a3b_gguf.report.plan_bars import bar, parts
from a3b_gguf.report.plan_export import EXPORTS, arguments, llama_server, llama_swap, ollama
from a3b_gguf.report.plan_svg import svg
from a3b_gguf.units import GIB
from command import assert_refused
from inside import inside as a3b
from kin_headers import sparse_35b_mtp
from true_header import sparse_35b

SERVER_FLAGS: dict[str, str] = json.loads(Path(__file__).with_name("golden").joinpath("llama_server_flags.json").read_text())
# docs/modelfile.mdx, and the Runner options of api/types.go, of Ollama
MODELFILE_PARAMETERS = {"num_ctx", "num_gpu", "num_batch", "num_thread", "use_mmap", "draft_num_predict"}
# properties of a model in llama-swap's config-schema.json
SWAP_KEYS = {"cmd", "name", "checkEndpoint", "env"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_35b(tmp_path_factory.mktemp("outputs") / "my 35b.gguf", "iq4_nl")


@pytest.fixture(scope="module")
def b35(file: Path) -> Facts:
    return read_facts(file)


def machine(*cards: str, ram: int = 32) -> Machine:
    return with_gpus(with_ram(Machine(0, 0, 8), ram * GIB), gpus.devices(tuple(gpus.find(card) for card in cards), ram * GIB))


@pytest.fixture(scope="module")
def plans(b35: Facts, tmp_path_factory: pytest.TempPathFactory) -> list[Plan]:
    """All on one card, experts in RAM whole and in part, two cards, no card, drafts."""
    mtp = read_facts(sparse_35b_mtp(tmp_path_factory.mktemp("outputs") / "mtp.gguf"))
    return [
        plan(b35, machine("RTX 3090"), Wishes(n_ctx=64000)),
        plan(b35, machine("RTX 3060 12GB"), Wishes(n_ctx=64000, n_parallel=2)),
        plan(b35, machine("RTX 3060 12GB", "RTX 4060"), Wishes(n_ctx=131072)),
        plan(b35, machine(), Wishes(n_ctx=64000)),
        plan(mtp, machine("RTX 3090"), Wishes(n_ctx=32768, n_draft=2)),
        plan(b35, machine("RTX 3060 12GB"), Wishes(n_ctx=64000, kv_type="q8_0/q4_0")),
    ]


def test_llama_server_knows_every_flag_and_its_kind_of_value(plans: list[Plan]) -> None:
    for made in plans:
        words = arguments(made)
        assert words == shlex.split(llama_server(made).replace("\\\n", " "))[1 + len(made.environment) :]
        i = 0
        while i < len(words):
            assert words[i] in SERVER_FLAGS, words[i]
            value = SERVER_FLAGS[words[i]]
            if value:
                i += 1
                assert not words[i].startswith("--"), words[i - 1]
                if value == "N":
                    int(words[i])
                elif "|" in value or value.startswith("none,"):
                    assert words[i] in value.strip("[]").replace("|", ",").split(",")
            i += 1


def test_the_command_says_what_the_plan_says(plans: list[Plan], file: Path) -> None:
    words = arguments(plans[1])
    given = dict(pairwise(words))
    load = plans[1].load
    assert given["--model"] == str(file)
    assert given["--override-tensor"] == ",".join(f"{pattern}=CPU" for pattern, _ in load.tensor_overrides)
    assert int(given["--n-cpu-moe"]) == len(load.cpu_expert_layers) > 20
    assert (given["--load-mode"], given["--fit"], given["--parallel"]) == ("none", "off", "2")
    assert int(given["--ctx-checkpoints"]) * 2 == load.checkpoint_bytes // plans[1].facts.state_bytes
    two = arguments(plans[2])
    assert [int(n) for n in two[two.index("--tensor-split") + 1].split(",")] == list(plans[2].placement.tensor_split)
    drafts = arguments(plans[4])
    assert (drafts[drafts.index("--spec-type") + 1], drafts[drafts.index("--spec-draft-n-max") + 1]) == ("draft-mtp", "2")
    assert "--n-cpu-moe" not in arguments(plans[0])


def test_layers_that_are_not_the_first_are_named_by_pattern(b35: Facts) -> None:
    """The second card's experts in RAM begin in the middle of the model, where --n-cpu-moe cannot reach."""
    made = plan(b35, machine("RTX 3090", "RTX 4060"), Wishes(n_ctx=262144))
    made = replace(made, load=replace(made.load, cpu_expert_layers=(30, 31), tensor_overrides=()))
    words = arguments(made)
    assert "--n-cpu-moe" not in words
    patterns = words[words.index("--override-tensor") + 1].split(",")
    assert patterns == [rf"blk\.{i}\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU" for i in (30, 31)]


def test_a_modelfile_has_only_what_ollama_documents(plans: list[Plan]) -> None:
    for made in plans:
        lines = [line for line in ollama(made).splitlines() if not line.startswith("#")]
        assert lines[0] == f"FROM {made.facts.path.resolve()}"
        given = dict(line.split(maxsplit=2)[1:] for line in lines[1:])
        assert all(line.startswith("PARAMETER ") for line in lines[1:])
        assert set(given) <= MODELFILE_PARAMETERS
        assert int(given["num_ctx"]) * made.load.n_seq_max == made.load.n_ctx
    assert "LLAMA_ARG_N_CPU_MOE=24" in ollama(plans[1])
    assert "one type for both caches" in ollama(plans[5])


def test_a_llama_swap_configuration_is_yaml_that_runs_the_same_command(plans: list[Plan]) -> None:
    for made in plans:
        config = yaml.safe_load(llama_swap(made))
        (name, model), *rest = config["models"].items()
        assert (name, rest) == (made.facts.path.stem, [])
        assert set(model) <= SWAP_KEYS
        words = shlex.split(model["cmd"])
        assert words[:5] == ["llama-server", "--host", "127.0.0.1", "--port", "${PORT}"]
        assert words[5:] == arguments(made)
        assert model.get("env", []) == [f"{name}={value}" for name, value in made.environment]


def test_exports_on_the_command_line(file: Path) -> None:
    card = ("--gpu", "RTX 3060 12GB", "--ram", "32GiB")
    for name, function in EXPORTS.items():
        done = a3b("plan", file, "--ctx", "64000", *card, "--cores", "8", "--export", name)
        assert (done.returncode, done.stderr) == (0, "")
        made = plan(read_facts(file), machine("RTX 3060 12GB"), Wishes(n_ctx=64000))
        assert done.stdout.strip() == function(made).strip()
    assert_refused(a3b("plan", file, *card, "--export", "lm-studio"), 2, "lm-studio")
    assert_refused(a3b("plan", file, *card, "--export", "ollama", "--json"), 2, "--json and --export")


# ---- pictures


def test_a_bar_has_every_byte_once(plans: list[Plan]) -> None:
    for made in plans:
        for budget in made.budgets:
            drawn = parts(made, budget)
            assert sum(part.n_bytes for part in drawn) == budget.total
            assert len(bar(drawn, 64)) == 64
            used = sum(part.n_bytes for part in drawn if part.symbol in "EWKSCTB")
            assert used == budget.need


def test_a_figure_is_xml_with_a_bar_for_each_device(plans: list[Plan], file: Path, tmp_path: Path) -> None:
    for made in plans:
        root = ElementTree.fromstring(svg(made))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if list(each)]
        assert len(bars) == sum(len(parts(made, budget)) for budget in made.budgets)
        for each in bars:
            assert float(each.attrib["x"]) + float(each.attrib["width"]) <= float(root.attrib["width"])
    out = tmp_path / "plan.svg"
    assert a3b("plan", file, "--vram", "16GiB", "--ram", "32GiB", "--svg", out).returncode == 0
    assert ElementTree.parse(out).getroot() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]
    assert_refused(a3b("plan", file, "--vram", "16GiB", "--ram", "32GiB", "--svg", tmp_path / "no" / "x.svg"), 2, "No such file")


# ---- the table


def test_the_table_is_one_plan_a_cell(b35: Facts) -> None:
    where = machine("RTX 4070 Ti SUPER")
    cells = table(b35, where, Wishes(n_ctx=64000))
    assert [cell.n_ctx for cell in cells[::3]] == [4096, 8192, 16384, 32768, 64000, 65536, 131072, 262144]
    for cell in cells:
        made = plan(b35, where, Wishes(n_ctx=cell.n_ctx, kv_type=cell.kv_type))
        assert (cell.need, cell.left) == (made.budgets[1].need, made.budgets[1].left)
    by_pair = {(cell.n_ctx, cell.kv_type): cell for cell in cells}
    # Ten attention layers keep a cache, not forty: the error of the write-up that this table corrects.
    assert round(by_pair[64000, "f16"].cache / 2**20, 2) == 1250.00
    assert round(by_pair[64000, "q8_0"].cache / 2**20, 2) == 664.06
    assert round(by_pair[262144, "q4_0"].cache / 2**20, 2) == 1440.00


def test_a_table_says_what_does_not_fit(file: Path) -> None:
    done = a3b("plan", file, "--vram", "8GiB", "--ram", "17GiB", "--table")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 21
    assert any(row[-3:] == ["does", "not", "fit"] for row in rows)
    assert any("experts" in row for row in rows)
    made = json.loads(a3b("plan", file, "--vram", "8GiB", "--ram", "17GiB", "--table", "--json").stdout)
    assert made["device"] == "GPU0"
    assert {cell["need"] is None for cell in made["cells"]} == {True, False}


# ---- models that are not there yet


def test_a_model_of_the_catalog_is_planned_by_its_dimensions(file: Path) -> None:
    """The same bytes as the file that has them, with the MTP block that the catalog knows of."""
    named, real = read_facts(Path("qwen3.6"), "iq4_nl"), read_facts(file)
    assert named.layers == real.layers
    assert (named.embedding_bytes, named.output_bytes, named.other_bytes) == (real.embedding_bytes, real.output_bytes, real.other_bytes)
    assert len(named.nextn) == 1
    done = a3b("plan", "qwen3.6", "--type", "iq4_nl", "--gpu", "RTX 3090", "--ram", "32GiB")
    assert done.returncode == 0
    assert "there is no such file yet" in done.stdout
    assert_refused(a3b("plan", "qwen3.6", "--type", "iq9_z", "--vram", "0"), 2, "iq9_z")
    assert_refused(a3b("plan", "no-such-model", "--type", "iq4_nl", "--vram", "0"), 3, "no-such-model")


def test_a_float_file_is_planned_as_it_would_be_quantized(tiny_bf16: Path, tiny_checkpoint: Path) -> None:
    floats, smaller = read_facts(tiny_bf16), read_facts(tiny_bf16, "iq4_nl")
    assert smaller.weight_bytes < 0.6 * floats.weight_bytes
    assert read_facts(tiny_checkpoint, "iq4_nl").layers == smaller.layers


def test_an_export_loads_nothing_heavy(file: Path) -> None:
    code = (
        "import sys; sys.argv = ['a3b', 'plan', sys.argv[1], '--gpu', 'RTX 3090', '--ram', '32GiB', '--export', 'llama-server']; "
        "from a3b_gguf.cli import build; build()(standalone_mode=False); "
        "sys.stderr.write(str([m for m in ('numpy', 'llama_cpp', 'gguf', 'rich', 'numba') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.stderr == "[]"
