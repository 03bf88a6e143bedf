"""The memory that a calibration takes, told from the headers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.llama.watch import FEWEST_ROWS, LOGIT_BYTES, MOST_ROWS
from a3b_gguf.units import MIB
from a3b_quantize.histogram import N_BINS
from a3b_quantize.sites import BY_EXPERT, experts_by_layer

MARGIN = 512 * MIB  # context, graph and activations of a batch, the interpreter
SHARED_INPUT = (".ffn_up", ".attn_k.", ".attn_v.", ".ssm_alpha.", ".ssm_beta.", ".attn_gate.")  # summed with another weight's


def needed_bytes(parts: Sequence[GGUFFile], n_ctx: int, winsorize: bool) -> int:
    """Model, logits of a batch, sums, histograms, and a margin. An upper estimate: each input of a block counts as a sum of its own."""
    shapes = {info.name: info.shape for part in parts for info in part.tensors}
    model = sum(part.file_size for part in parts)
    n_vocab = next((shape[0] for name, shape in shapes.items() if name == "token_embd.weight"), 0)
    rows = max(FEWEST_ROWS, min(MOST_ROWS, n_ctx, LOGIT_BYTES // (4 * max(n_vocab, 1))))
    inputs = [
        prod(shape[:-2]) * shape[-1]
        for name, shape in shapes.items()
        if name.startswith("blk.") and len(shape) > 1 and not any(part in name for part in SHARED_INPUT)
    ]
    sums = 8 * sum(inputs) * (2 if winsorize else 1)
    histograms = 8 * (N_BINS + 1) * len(BY_EXPERT) * sum(experts_by_layer(shapes).values())
    return model + 2 * 4 * rows * n_vocab + 2 * sums + histograms + MARGIN  # twice: the state is saved from a copy
