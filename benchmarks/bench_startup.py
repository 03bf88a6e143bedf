"""Start-up: `a3b --help`, and how much more `a3b inspect` takes on a sparse 18 GiB file with a 248,320-token vocabulary.

Limits: 0.15 s for the help, 0.3 s more for inspect. gguf-py's reader on the same file is shown beside it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from true_header import sparse_35b  # noqa: E402

HELP_LIMIT_S, INSPECT_LIMIT_S, RUNS = 0.15, 0.3, 9


def seconds(*command: str, runs: int = RUNS) -> float:
    """Median wall time of a whole process."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    a3b = str(Path(sys.executable).parent / "a3b")
    with tempfile.TemporaryDirectory() as folder:
        path = sparse_35b(Path(folder) / "35b.gguf", "iq4_nl")
        help_s, inspect_s = seconds(a3b, "--help"), seconds(a3b, "inspect", str(path))
        peer_s = seconds(sys.executable, "-c", f"import gguf; gguf.GGUFReader({str(path)!r})", runs=1)
        print(f"file: {path.stat().st_size / 2**30:.2f} GiB, sparse")
    print(f"a3b --help                   {help_s:7.3f} s   limit {HELP_LIMIT_S} s")
    print(f"a3b inspect, beyond the help {inspect_s - help_s:7.3f} s   limit {INSPECT_LIMIT_S} s")
    print(f"gguf-py's GGUFReader         {peer_s:7.3f} s   for comparison, one run, import included")
    return int(help_s > HELP_LIMIT_S or inspect_s - help_s > INSPECT_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
