"""The README is true: its commands run and print what it shows, its tables equal the tables in the code."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from a3b_convert.archs import ARCHS
from a3b_gguf.cli import COMMANDS
from a3b_gguf.errors import A3BError
from a3b_quantize.recipe import load_recipe, names
from a3b_server.routes import ROUTES
from true_header import sparse_35b

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TRANSCRIPTS = re.findall(r"^```console\n(.*?)^```", README, re.M | re.S)
CHECK = doctest.OutputChecker()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: the embedded model, and a file of the 35B (here its header)."""
    made = tmp_path_factory.mktemp("readme")
    (made / "models").symlink_to(ROOT / "models")
    sparse_35b(made / "qwen3.6-35b-a3b-iq4_nl.gguf", "iq4_nl")
    return made


def shell(command: str, cwd: Path) -> str:
    """What the command prints, on a terminal's path with `a3b` on it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", command], cwd=cwd, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True, timeout=120)
    return done.stdout


def test_transcripts(folder: Path) -> None:
    """One after another, as a reader would: later ones use what earlier ones wrote."""
    assert len(TRANSCRIPTS) == 3
    for transcript in TRANSCRIPTS:
        for step in re.split(r"^\$ ", transcript, flags=re.M)[1:]:
            command, _, shown = step.partition("\n")
            printed = shell(command, folder)
            assert CHECK.check_output(shown, printed, doctest.ELLIPSIS), f"$ {command}\n{printed}\n--- README has\n{shown}"


def table(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its two head rows."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"(^\|.*\n)+", section, re.M)
    assert found is not None, heading
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]


def test_commands() -> None:
    documented = {name.removeprefix("a3b "): does for name, does in table("Commands")}
    assert documented.keys() == COMMANDS.keys()
    for name, does in documented.items():
        written = " ".join((COMMANDS[name].__doc__ or "").split())
        assert written.startswith(does), name


def test_exit_codes() -> None:
    section = README.split("Exit codes:")[1].split("\n## ")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.M)}
    assert codes == {0, 130, *(kind.exit_code for kind in A3BError.__subclasses__())}


def test_architectures() -> None:
    assert table("What it converts") == [[arch.gguf_name, ", ".join(arch.hf_names)] for arch in ARCHS]


def test_recipes() -> None:
    assert table("What it quantizes to") == [[name, load_recipe(name).description] for name in names()]


def test_endpoints() -> None:
    documented = {tuple(entry.split()) for row in table("What it serves") for entry in row[0].split(", ")}
    assert documented == {(route.method, route.path) for route in ROUTES}


def test_every_named_file_is_there() -> None:
    for name in re.findall(r"\]\(([^)#]+)\)|^\| `([^`]+)` \|", README.split("## Where things are")[1] + README, re.M):
        path = name[0] or name[1]
        if "/" in path or "." in path:
            assert path.startswith("http") or (ROOT / path).exists(), path
