"""How long threads spin for each other: set where the user has not chosen."""

from __future__ import annotations

import os
import subprocess
import sys

from a3b_gguf.openmp import SPIN_COUNT, spin_defaults


def test_a_spin_count_is_set_where_the_user_has_chosen_nothing() -> None:
    assert spin_defaults({}) == {"GOMP_SPINCOUNT": SPIN_COUNT}
    assert spin_defaults({"OMP_WAIT_POLICY": "passive"}) == {}
    assert spin_defaults({"GOMP_SPINCOUNT": "5"}) == {}


def test_the_command_sets_it_before_anything_is_loaded() -> None:
    lines = ("import os, sys", "from a3b_gguf.cli import main", "try: main()", "finally: print(os.environ.get('GOMP_SPINCOUNT'))")
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = [sys.executable, "-c", "\n".join(lines), "--version"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == SPIN_COUNT
