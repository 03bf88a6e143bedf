"""Compute buffers on GPUs: what llama.cpp's own scheduler and allocator reserve on GPUs that are not there, to 0.1 MiB."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from a3b_gguf.flows.plan_facts import read_facts
from a3b_gguf.memory.facts import Facts
from gpu_buffers import FILE, MODELS, cases, load, predicted
from pretend_gpu import buffers_on_gpus

CASES = list(cases())
RESERVED: list[dict[str, float]] = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    folder = tmp_path_factory.mktemp("gpu")
    return {name: read_facts(make(folder / f"{name}.gguf")) for name, make in MODELS.items()}


def test_the_record_is_of_these_cases() -> None:
    assert len(RESERVED) == len(CASES) == 48


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i].model} {CASES[i].backend} x{CASES[i].n_gpus} {i}")
def test_the_replay_takes_what_the_allocator_reserved(facts: dict[str, Facts], number: int) -> None:
    case, real = CASES[number], RESERVED[number]
    found = predicted(facts[case.model], case)
    assert set(found) == set(real)
    for device, size in real.items():
        if device == "RAM" and case.load.n_gpu_layers < 99:
            assert found[device] >= size  # the host's inputs are counted high when layers are in RAM
        elif device == "CUDA1" and case.load.cpu_expert_layers:
            assert found[device] == pytest.approx(size, rel=0.04)  # what a second GPU is handed, without a pipeline, is left out
        else:
            assert found[device] == pytest.approx(size, abs=0.1), device


def test_the_record_is_what_the_installed_llama_cpp_says(tmp_path: Path) -> None:
    """One of the cases asked anew, and a llama.cpp with another answer would be noticed."""
    number = next(i for i, case in enumerate(CASES) if case.model == "dense")
    asked = CASES[number].load
    found = buffers_on_gpus(MODELS["dense"](tmp_path / "dense.gguf"), [asked, load(4096, "q8_0", 512)])
    assert found[0] == RESERVED[number]
    assert found[1] != found[0]
