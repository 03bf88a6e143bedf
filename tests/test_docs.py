"""What the pages say of the command line is so: every flag exists, every command that is shown can be parsed, links lead to files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from a3b_gguf.cli import build

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
FOREIGN = {"--kl-divergence"}  # llama-perplexity's
SHOWN = re.compile(r"^ *(?:\$ )?(?:echo .*\| )?a3b (.*)$", re.M)  # a line of its own in a block of commands
APP: typer.core.TyperGroup = typer.main.get_command(build())  # type: ignore[assignment]
FLAGS = {name: {flag for each in command.params for flag in each.opts} | {"--help"} for name, command in APP.commands.items()}


def blocks(text: str) -> str:
    """The fenced and the indented blocks of a page."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    indented = re.findall(r"^    .*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return "\n".join([*fenced, *indented])


def lines() -> list[tuple[str, str]]:
    """Every shown command line, with its page; lines that go on behind a backslash are one. Not: [optional] words."""
    found = [(page.name, line) for page in PAGES for line in SHOWN.findall(blocks(page.read_text()).replace("\\\n", " "))]
    assert len(found) > 20
    return [(page, line) for page, line in found if "[-" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page: Path) -> None:
    known = set().union(*FLAGS.values(), FOREIGN, {"--version"})
    assert set(FLAG.findall(page.read_text())) <= known


@pytest.mark.parametrize(("page", "line"), lines())
def test_commands_that_are_shown_parse(page: str, line: str) -> None:
    words = shlex.split(re.split(r" [|>&;#] ?| {3,}", line)[0])
    words = [re.sub(r"^([\w-]+)\|[\w|-]+$", r"\1", word) for word in words if word != "--help"]  # of alternatives the first
    APP.commands[words[0]].make_context(words[0], words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for name in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert name.startswith("http") or (page.parent / name).exists(), name
