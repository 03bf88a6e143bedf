"""Writes quantize_llama_quantize.json: what llama-quantize makes of the embedded model and importance matrices that we wrote.

    make peers
    .venv/bin/python tests/golden/scripts/quantize_llama_quantize.py

The source is the embedded model with two rows of each matrix, the matrices are those of tests/imatrix_files.py, in both formats.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests")]

from a3b_convert import convert  # noqa: E402
from a3b_gguf.gguf_file import read_gguf  # noqa: E402
from a3b_quantize.imatrix import write_imatrix  # noqa: E402
from imatrix_files import digests, made_up, values_of, write_dat  # noqa: E402
from small_gguf import narrow  # noqa: E402

PROGRAM = ROOT / "build" / "peers" / "cmake" / "bin" / "llama-quantize"
OUT = ROOT / "tests" / "golden" / "quantize_llama_quantize.json"
NEW, OLD = "imatrix.gguf", "imatrix.dat"
RUNS = [("iq4_xs", NEW), ("q4_k_m", NEW), ("iq2_xxs", NEW), ("iq4_nl", OLD), ("q3_k_m", OLD)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(ROOT / "models" / "tiny-a3b", folder / "tiny.gguf")
        source = narrow(folder / "tiny.gguf", folder / "narrow.gguf", rows=2)
        imatrix = made_up(source)
        write_imatrix(folder / "imatrix.gguf", imatrix)
        write_dat(folder / "imatrix.dat", values_of(imatrix))
        found = []
        for kind, file in RUNS:
            command = [str(PROGRAM), "--imatrix", file, "narrow.gguf", f"{kind}.gguf", kind, "2"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            written = read_gguf(folder / f"{kind}.gguf")
            notes = {key: [value.kind, value.value] for key, value in written.metadata.items() if key.startswith("quantize.")}
            found.append({"type": kind, "imatrix": file, "metadata": notes, "tensors": digests(written.path)})
        weights = hashlib.sha256((ROOT / "models" / "tiny-a3b" / "model.safetensors").read_bytes()).hexdigest()
        OUT.write_text(json.dumps({"safetensors_sha256": weights, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
