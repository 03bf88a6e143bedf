"""Ctrl-C goes to every process of a command: one of them answers, none prints a traceback, nobody waits for one that is gone."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from operator import methodcaller

import pytest

import a3b_gguf.cli
from a3b_gguf import __main__
from a3b_gguf.errors import MachineLacks
from a3b_gguf.flows import plan_here
from a3b_gguf.interrupts import deaf_children

ASK = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_children_do_not_hear_it_and_this_process_does() -> None:
    def hears_not() -> str:
        return subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout.strip()

    with deaf_children():
        assert hears_not() == "True"
    assert hears_not() == "False"
    with deaf_children():
        signal.raise_signal(signal.SIGINT)
        signal.sigwait({signal.SIGINT})  # it waited


def test_a_process_that_dies_while_it_asks_the_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver may make it: the pipe is closed and nothing was told."""
    monkeypatch.setattr(plan_here, "_tell_machine", methodcaller("close"))
    with pytest.raises(MachineLacks, match="ended with 0") as caught:
        plan_here.machine_here()
    assert "--vram" in caught.value.hint


def test_errors_cross_processes_with_their_advice() -> None:
    told = pickle.loads(pickle.dumps(MachineLacks("what", "what to do")))
    assert (type(told), told.message, told.hint) == (MachineLacks, "what", "what to do")


def test_while_it_is_still_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(a3b_gguf.cli, "main", interrupted)
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 130
