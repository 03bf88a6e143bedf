"""The proof that a loaded model computes, before anybody is told that it is ready.

A model that fits by a hair loads, and fails at its first request, when the driver allocates what it needs to compute; public
reports have servers that say "ready" and answer with no tokens.
"""

from __future__ import annotations

import numpy as np

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.batch import Batch, decode, drop, logits
from a3b_gguf.llama.load import Context
from a3b_server.calls import Limits


def first_call(context: Context, limits: Limits) -> None:
    """Computes a whole batch of prompt and one token more. Raises MachineLacks when that fails or is no number."""
    n_rows = max(1, min(limits.n_batch, limits.n_ctx_seq - 1))
    batch = Batch(limits.n_batch)
    try:
        for tokens, pos in (([i % limits.n_vocab for i in range(n_rows)], 0), ([0], n_rows)):
            batch.clear()
            last = batch.add(0, pos, tokens, 1)
            code = decode(context, batch)
            if code:
                hint = "leave more memory free: a larger --margin, less --ctx"
                raise MachineLacks(f"the model is loaded, but its first computation failed ({code})", hint)
            if not np.isfinite(logits(context, last, limits.n_vocab)).all():
                raise MachineLacks("the model is loaded, but what it computes is not a number", "try another --kv-type, or check the file")
    finally:
        drop(context, 0)
