"""What the embedded model gets exactly right, as bf16 and as our IQ4_NL: tool calls and plain questions, greedy, thinking off.

Limits: bf16 at least 95 % of tool calls and 85 % of plain questions; IQ4_NL at most 3 points less of each.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "tiny-a3b"
LEAST = {"tool calls": 95.0, "plain": 85.0}
MOST_LOST_POINTS = 3.0
QUESTIONS = "150"


def made(folder: Path) -> dict[str, Path]:
    """The checkpoint as two GGUF files."""
    a3b = str(Path(sys.executable).parent / "a3b")
    files = {"bf16": folder / "bf16.gguf", "iq4_nl": folder / "iq4_nl.gguf"}
    subprocess.run((a3b, "convert", MODEL, "-o", files["bf16"]), check=True, capture_output=True)
    subprocess.run((a3b, "quantize", MODEL, "--type", "iq4_nl", "--no-bounds", "-o", files["iq4_nl"]), check=True, capture_output=True)
    return files


def exact(path: Path) -> dict[str, float]:
    """Percent of exact answers by sort of question, as evaluate.py counts them."""
    done = subprocess.run((sys.executable, MODEL / "evaluate.py", path, QUESTIONS), check=True, capture_output=True, text=True)
    print(f"{path.stem}, {path.stat().st_size:,} bytes:\n{done.stdout}", end="")
    return {kind: 100 * int(right) / int(asked) for kind, right, asked in re.findall(r"^(.+): (\d+) of (\d+) exact", done.stdout, re.M)}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        scores = {name: exact(path) for name, path in made(Path(folder)).items()}
    print(f"\n{'':12}{'bf16':>8}{'iq4_nl':>8}{'lost':>8}   limits")
    failed = False
    for kind, least in LEAST.items():
        bf16, ours = scores["bf16"][kind], scores["iq4_nl"][kind]
        print(f"{kind:12}{bf16:8.1f}{ours:8.1f}{bf16 - ours:8.1f}   at least {least} %, at most {MOST_LOST_POINTS} points lost")
        failed |= bf16 < least or bf16 - ours > MOST_LOST_POINTS
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
