"""How long llama.cpp's threads spin while they wait for each other."""

from __future__ import annotations

from collections.abc import Mapping

# OpenMP's own default spins so long that one other busy process makes a step 3 times slower; sleeping at once (OMP_WAIT_POLICY=passive)
# makes it 2 to 12 times slower on a machine that does nothing else. Measured in benchmarks/bench_spin.py. Read by GCC's libgomp alone.
SPIN_COUNT = "2000"


def spin_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add before llama.cpp is loaded, which reads them once; none where the user has chosen."""
    chosen = "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment
    return {} if chosen else {"GOMP_SPINCOUNT": SPIN_COUNT}
