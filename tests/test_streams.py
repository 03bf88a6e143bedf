"""What a terminal, a pipe and a full disk do to the output of a command: an answer or one message, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from command import A3B, assert_refused
from small_gguf import write_arrays

LATIN1 = {"PYTHONIOENCODING": "latin-1"}
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UTF8 = {"PYTHONIOENCODING": "utf-8"}
NO_TEXT = b"mod\xffel.gguf"  # a file's name may be any bytes
UNICODE = "m\u00f6del \u6a21\u578b.gguf".encode()


def run(shell: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell in which `a3b` is the command."""
    words = ["bash", "-o", "pipefail", "-c", f'a3b() {{ {sys.executable} {A3B} "$@"; }}; {shell}']
    return subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace", timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streams")
    write_arrays(made / "m.gguf", {"token_embd.weight": np.zeros((4, 32), np.float32)})
    for name in (NO_TEXT, UNICODE):
        os.link(made / "m.gguf", os.path.join(os.fsencode(made), name))
    return made


@pytest.mark.parametrize("command", ["--help", "inspect m.gguf --json"])
def test_a_full_disk_behind_the_output(folder: Path, command: str) -> None:
    assert_refused(run(f"a3b {command} > /dev/full", folder), 4, "No space left on device")


def test_a_reader_that_goes_away_changes_no_answer(folder: Path) -> None:
    done = run("a3b inspect m.gguf --tensors | true && a3b inspect m.gguf --diff m.gguf | head -c 1 && a3b inspect --help | true", folder)
    assert (done.returncode, done.stderr) == (0, "")
    done = run("a3b inspect absent | true", folder)
    assert_refused(done, 3, "absent")
    assert run("a3b nonsense 2>&1 | true", folder).returncode == 2


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_streams_that_cannot_be_used(folder: Path, closed: str) -> None:
    """The exit code is the answer's; what cannot be said is not."""
    done = run(f"(a3b inspect m.gguf) {closed}; echo $?; (a3b inspect absent) {closed}; echo $?; (a3b nonsense) {closed}; echo $?", folder)
    assert [line for line in done.stdout.split("\n") if line.isdigit()] == ["0", "3", "2"]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("environment", "name"), [(UTF8, NO_TEXT), (C, NO_TEXT), (C, UNICODE), (LATIN1, UNICODE)])
def test_names_that_the_terminal_cannot_show(folder: Path, name: bytes, environment: dict[str, str]) -> None:
    def raw(*words: bytes | str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([A3B, *words], cwd=folder, env={**os.environ, **environment}, capture_output=True, timeout=120)

    shown = raw("inspect", name)
    assert (shown.returncode, shown.stderr) == (0, b"")
    told = json.loads(raw("inspect", name, "--json").stdout.decode("utf-8"))  # JSON is UTF-8, and nothing else is on the way
    assert os.fsencode(told["path"]) == name
    assert b"Traceback" not in raw("inspect", b"no" + name).stderr


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows the home of a container's user 12345."""
    from a3b_gguf.user_cache import cache_folder

    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for given in ("", "relative"):  # the specification: a path that is not absolute is to be ignored
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == Path("/nonexistent/.cache/a3b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/given")
    assert cache_folder() == Path("/given/a3b")
