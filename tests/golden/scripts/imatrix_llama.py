"""Makes ../imatrix_tiny_a3b.npz with llama.cpp's own imatrix tool, built from the source of the pinned llama-cpp-python.

    python benchmarks/build_peers.py build/peers && cmake --build build/peers/cmake --target llama-imatrix
    python tests/golden/scripts/imatrix_llama.py build/peers/cmake/bin/llama-imatrix

The text is quantize/a3b_quantize/sample.txt, four chunks of 128 tokens. Of the sums every 16th number is kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from a3b_convert import convert

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "models" / "tiny-a3b"
TEXT = ROOT / "quantize" / "a3b_quantize" / "sample.txt"
N_CTX, N_CHUNKS, STEP = 128, 4, 16


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder, "tiny.gguf"), Path(folder, "imatrix.gguf")
        convert(CHECKPOINT, model)
        size = ("--chunks", N_CHUNKS, "-c", N_CTX, "-b", N_CTX, "-t", 1)
        command = (sys.argv[1], "-m", model, "-f", TEXT, "-o", out, "--parse-special", "--no-ppl", *size)
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
        arrays = {tensor.name: tensor.data for tensor in gguf.GGUFReader(out).tensors}
    kept = {name: values.ravel()[::STEP] if name.endswith(".in_sum2") else values.ravel() for name, values in arrays.items()}
    digest = hashlib.sha256((CHECKPOINT / "model.safetensors").read_bytes()).hexdigest()
    text = hashlib.sha256(TEXT.read_bytes()).hexdigest()
    path = Path(__file__).parents[1] / "imatrix_tiny_a3b.npz"
    np.savez_compressed(path, safetensors_sha256=np.array(digest), text_sha256=np.array(text), **kept)
    sys.stdout.write(f"{path}: {path.stat().st_size:,} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
