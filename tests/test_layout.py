"""The shape of the repository: layers that hold, modules that stay small, a start that stays fast, one version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import a3b_gguf
from module_sizes import LIMIT, too_long

ROOT = Path(__file__).parent.parent
PACKAGES = ("a3b_gguf", "convert", "quantize", "server")

# file, the import that must not stand there, the contract that it breaks
PLANTED = [
    ("a3b_gguf/memory/terms.py", "import a3b_gguf.planner", "Layers"),
    ("convert/a3b_convert/config.py", "import a3b_quantize", "Layers"),
    ("a3b_gguf/gguf_file.py", "import a3b_gguf.gguf_write", "Layers"),
    ("server/a3b_server/app.py", "import llama_cpp", "Only a3b_gguf.llama touches llama_cpp"),
    ("a3b_gguf/planner/rules.py", "import rich", "Only a3b_gguf.report touches rich"),
    ("a3b_gguf/flows/models.py", "import typer", "Only a3b_gguf.cli touches typer"),
    ("a3b_gguf/memory/terms.py", "import numpy", "Planning is arithmetic"),
    ("quantize/a3b_quantize/recipe.py", "import fastapi", "Only a3b_server touches the web framework"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone, in a folder where a violation may be planted."""
    folder = tmp_path_factory.mktemp("copy")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint_imports(folder: Path) -> str:
    """What lint-imports says of the packages in `folder`."""
    code = (
        f"import sys; sys.path[:0] = {[str(folder / name) for name in ('', *PACKAGES[1:])]!r}; "
        "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("file", "line", "contract"), PLANTED, ids=[f"{file}: {line}" for file, line, _ in PLANTED])
def test_each_contract_breaks_when_violated(copy: Path, file: str, line: str, contract: str) -> None:
    planted = copy / file
    original = planted.read_text()
    try:
        planted.write_text(original + f"\n{line}\n")
        said = lint_imports(copy)
    finally:
        planted.write_text(original)
    broken = re.findall(r"^(.*) BROKEN", said, re.M)
    assert [name for name in broken if name.startswith(contract)], said


def test_no_contract_is_broken(copy: Path) -> None:
    assert "0 broken" in lint_imports(copy)


def test_no_module_over_the_limit(tmp_path: Path) -> None:
    assert too_long(ROOT) == []
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "long.py").write_text("\n" * (LIMIT + 1))
    assert too_long(tmp_path) == [f"tests/long.py: {LIMIT + 1} lines, at most {LIMIT}"]


def test_help_loads_nothing_heavy() -> None:
    heavy = ("numpy", "gguf", "llama_cpp", "rich", "fastapi", "jinja2", "asyncio", "multiprocessing")
    code = f"import sys; from a3b_gguf.cli import build; build(); print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_changelog_starts_with_the_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first[1] == a3b_gguf.__version__


def test_every_dependency_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S), re.search(r"^dev = \[\n(.*?)^\]", text, re.M | re.S)
    for found in lists:
        assert found is not None
        assert all(re.match(r'    "[^"]+", +# \w.{10,}', line) for line in found[1].splitlines()), found[1]


def test_every_command_has_a_file_and_help() -> None:
    from a3b_gguf.cli import COMMANDS

    files = {path.stem for path in (ROOT / "a3b_gguf" / "cli").glob("*.py")} - {"__init__", "wishes"}
    assert {name.replace("-", "_") for name in COMMANDS} == files
    assert all(function.__doc__ for function in COMMANDS.values())
