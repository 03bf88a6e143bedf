"""`a3b plan` as a user types it: what it prints, what it refuses, and what it leaves unloaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from inside import inside as a3b
from true_header import sparse_35b

NUMBER = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def rows(**properties: object) -> dict[str, object]:
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1}


SCHEMA = {
    "type": "object",
    "properties": {
        "model": {"type": "object", "required": ["path", "name", "architecture", "weight_bytes"]},
        "machine": {"type": "object", "required": ["ram_total", "ram_available", "n_cores", "gpus", "described"]},
        "terms": rows(name=TEXT, device=TEXT, n_bytes=NUMBER, exact={"type": "boolean"}, held={"enum": ["own", "mapped", "pinned"]}),
        "budgets": rows(device=TEXT, total=NUMBER, available=NUMBER, reserve=NUMBER, need=NUMBER, left={"type": "integer"}),
        "choices": rows(choice=TEXT, value=TEXT, why=TEXT),
        "warnings": {"type": "array", "items": TEXT},
        "load": {"type": "object", "required": ["n_ctx", "n_seq_max", "n_outputs_max", "n_gpu_layers", "cpu_expert_layers", "kv_type_k"]},
        "speed": {"type": "object", "required": ["prefill", "decode", "decode_full", "assumed"]},
        "environment": {"type": "object", "additionalProperties": TEXT},
        "dry_run": {"type": ["array", "null"]},
        "measured": {"type": ["object", "null"]},
    },
    "required": ["model", "machine", "terms", "budgets", "choices", "warnings", "load", "speed", "environment"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def b35(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sparse_35b(tmp_path_factory.mktemp("command") / "35b.gguf", "iq4_nl"))


def test_a_person_gets_tables_reasons_and_one_line_of_parameters(b35: str) -> None:
    card = ("--gpu", "RTX 4070 Ti SUPER", "--ram", "32GiB", "--ram-bandwidth", "DDR5-6000", "--cores", "8")
    done = a3b("plan", b35, "--ctx", "64000", *card)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "Qwen3.6 35B A3B: qwen35moe, 40 layers (10 attention, 30 DeltaNet), 8 of 256 experts used, weights 19.14 GiB"
    )
    assert lines[1] == "for a described machine: RAM 32.00 GiB, CUDA0 16.00 GiB, 8 cores"
    found = {line.split("  ")[0].strip(): re.findall(r"~?[\d,]+\.\d", line) for line in lines}
    assert found["routed experts"] == ["5,904.0", "11,376.0"]
    assert found["KV cache"] == ["664.1"]
    assert found["left after loading"] == ["22,545.6", "1,105.7"]
    assert found["of which kept free on purpose"] == ["1,024.0", "1,024.0"]
    assert any(line.startswith("experts in RAM") and "13 layers (0-12) and of layer 13 down and up" in line for line in lines)
    bars = [line for line in lines if re.match(r"(RAM  |CUDA0) \|[^|]{64}\| ", line)]
    assert len(bars) == 2
    assert all(letter in bars[1] for letter in "xEWKB-")
    speeds = next(line for line in lines if line.startswith("writing, context empty"))
    assert re.findall(r"\d+", speeds) == ["54", "90"]
    (load,) = (line for line in lines if line.startswith("load: "))
    assert "n_ctx=64000 n_seq_max=1 " in load
    assert "cpu_expert_layers=0,1,2,3,4,5,6,7,8,9,10,11,12 kv_type_k=q8_0" in load
    assert r"tensor_overrides=^blk\.13\.ffn_down_exps\.weight$=CPU,^blk\.13\.ffn_up_exps\.weight$=CPU" in load


def test_a_program_gets_json_whose_sums_agree(b35: str) -> None:
    done = a3b("plan", b35, "--ctx", "64k", "--vram", "16GiB", "--vram", "8GiB", "--ram", "32GiB", "--parallel", "2", "--json")
    made = json.loads(done.stdout)
    jsonschema.validate(made, SCHEMA)
    for budget in made["budgets"]:
        assert budget["need"] == sum(term["n_bytes"] for term in made["terms"] if term["device"] == budget["device"])
        assert budget["left"] == budget["available"] - budget["need"] >= budget["reserve"]
    assert [budget["device"] for budget in made["budgets"]] == ["RAM", "GPU0", "GPU1"]
    assert made["load"]["n_outputs_max"] == made["load"]["n_seq_max"] == 2


def test_the_machine_at_hand(tiny_bf16: Path) -> None:
    made = json.loads(a3b("plan", str(tiny_bf16), "--json").stdout)
    jsonschema.validate(made, SCHEMA)
    assert not made["machine"]["described"]
    assert made["load"]["n_ctx"] == 32768


def test_no_fit_ends_with_1_and_says_what_would(b35: str) -> None:
    done = a3b("plan", b35, "--ctx", "64000", "--vram", "8GiB", "--ram", "16GiB")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: Qwen3.6 35B A3B does not fit: RAM needs 13.96 GiB and has 13.00 GiB (16.00 GiB, 2.00 GiB in use, 1.00 GiB reserve)\n"
        "  what to do: a smaller quantization: experts in iq4_xs, about 18.20 GiB in all, a3b quantize ... --tensor-type _exps=iq4_xs "
        "(976.00 MiB);\n"
        "  or --ctx 31744 (397.69 MiB) together with --margin 512MiB, at the risk of failing at the first long prompt (512.00 MiB);\n"
        "  or more RAM (982.00 MiB)\n"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ctx", "300000"), "error: --ctx 300,000: the model was trained for 262,144 tokens"),
        (("--vram", "16 potatoes"), "error: --vram: '16 potatoes' is not a size"),
        (("--parallel", "257"), "error: --parallel: 257 slots, llama.cpp takes 1 to 256"),
    ],
)
def test_wrong_flags_end_with_2(b35: str, flags: tuple[str, ...], says: str) -> None:
    done = a3b("plan", b35, "--vram", "0", *flags) if "--vram" not in flags else a3b("plan", b35, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(says)
    assert "what to do: " in done.stderr


def test_wrong_files_end_with_3(tmp_path: Path, tiny_bf16: Path, tiny_checkpoint: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_bf16.read_bytes()[:5000])
    text = tmp_path / "text.gguf"
    text.write_text("not a model at all, only some words in a file")
    for file, says in (
        (tmp_path / "none.gguf", "none.gguf: No such file or directory"),
        (tiny_checkpoint, "is a folder, a plan needs the sizes in a .gguf file"),
        (cut, "is cut off: "),
        (text, "is not a GGUF file"),
        (Path("qwen3.6"), "Qwen3.6-35B-A3B is a model of the catalog, not a file"),
    ):
        done = a3b("plan", str(file), "--vram", "0")
        assert (done.returncode, done.stdout) == (3, ""), file
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_a_described_machine_loads_nothing_heavy(b35: str) -> None:
    code = (
        "import sys; sys.argv = ['a3b', 'plan', sys.argv[1], '--vram', '8GiB', '--ram', '32GiB', '--json']; "
        "from a3b_gguf.cli import build; build()(standalone_mode=False); "
        "sys.stderr.write(str([m for m in ('numpy', 'llama_cpp', 'gguf', 'rich') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, b35], capture_output=True, text=True)
    assert done.stderr == "[]"
