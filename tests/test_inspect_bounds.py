"""`a3b inspect clip_bounds.bin`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.clip_bounds import Header, Record
from a3b_gguf.report.clip_bounds import bars
from a3b_quantize.bounds import write_bounds
from command import assert_refused
from inside import inside as a3b

HEADER = Header("Modell ß", "qwen3moe", "ab" * 32, "cd" * 32, 512, "a text", "ef" * 32, {"a3b": "0.1.0"})
SITES = ("attn_in", "k_cache", "v_cache", "ffn_in", "down_in", "down_out", "residual")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [Record(layer, site, -1, 1000, 0, 8.0, 0.7, 1.8, 2.3, 4.0, 30.0) for layer in range(6) for site in SITES]
    rows[20] = replace(rows[20], non_finite=4)  # layer 2, residual
    changed = [replace(row, absmax=2000.0, sum32=50_000.0) if (row.layer, row.site) == (3, "down_out") else row for row in rows]
    changed.append(Record(3, "down_in", 17, 40, 0, 9.0, 0.1, 1.0, 2.0, 3.0, 4.0))
    write_bounds(tmp_path / "clip_bounds.bin", HEADER, changed)
    return tmp_path / "clip_bounds.bin"


def test_table_and_plot(path: Path) -> None:
    done = a3b("inspect", path)
    assert done.returncode == 0, done.stderr
    assert "activation ranges of Modell ß (qwen3moe), 43 records" in done.stdout
    assert "measured on 512 tokens of a text" in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("down_out"))
    assert row == ["down_out", "6", "0", "0.7", "2.3", "2000", "3", "5e+04", "0", "▁▁▁█▁▁"]
    assert next(line.split() for line in done.stdout.splitlines() if line.startswith("down_in"))[2] == "1"
    assert next(line.split() for line in done.stdout.splitlines() if line.startswith("residual"))[8] == "4"
    assert "layer 3 stands out: its down projection reaches 2,000, 250 times the median" in done.stdout
    assert "layer 3, down_out: reaches 5e+04, too near to the end of float16" in done.stdout
    assert "KV cache: keys q8_0, values q4_0 or finer" in done.stdout
    assert "Records" not in done.stdout


def test_every_record(path: Path) -> None:
    done = a3b("inspect", path, "--tensors")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["3", "down_in", "17", "40", "0", "0.1", "1", "2", "3", "9", "4"] in lines
    assert sum(len(line) == 11 and line[0].isdigit() for line in lines) == 43


def test_json(path: Path) -> None:
    found = json.loads(a3b("inspect", path, "--json").stdout)
    assert len(found["bounds"]["records"]) == 43
    assert found["standouts"] == [{"layer": 3, "absmax": 2000.0, "times": 250.0}]
    assert (found["advice"]["k"], found["advice"]["v"]) == ("q8_0", "q4_0")


def test_a_damaged_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(a3b("inspect", path), 3, "its header promises 43 records")


def test_without_the_caches(tmp_path: Path) -> None:
    write_bounds(tmp_path / "b.bin", HEADER, [Record(0, "residual", -1, 8, 0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0)])
    done = a3b("inspect", tmp_path / "b.bin")
    assert done.returncode == 0, done.stderr
    assert "KV cache" not in done.stdout


def test_bars() -> None:
    assert bars([1.0, 2.0, 256.0]) == "▁▂█"
    assert bars([0.0, 5.0]) == " █"
    assert bars([0.0, 0.0]) == "  "
    assert bars([1.0, 2.0**80]) == "▁█"
