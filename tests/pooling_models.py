"""Small models with random weights that pool: they answer a text with one vector. The same bytes every time, on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.gguf_model import open_gguf_model
from a3b_gguf.gguf_write import write_gguf
from a3b_gguf.metadata import Metadata, array, boolean, f32, string, u32
from a3b_gguf.tensors import TensorJob, TensorSource, n_rows
from small_gguf import llama_metadata, write_arrays

MEAN, CLS, LAST, RANK = 1, 2, 3, 4  # enum llama_pooling_type of llama.h
WIDTH = 64
Arrays = Mapping[str, NDArray[np.float32]]
WORDS = ("the", "a", "cat", "dog", "sat", "on", "mat", "is", "red", "blue", "##s", "##ing", "run", ".", ",", "!")


def values(shape: tuple[int, ...], seed: int, scale: float = 0.08) -> NDArray[np.float32]:
    """Numbers between -scale and scale from a generator that never changes (splitmix64)."""
    state = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    unit = ((state ^ (state >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / (1 << 24)
    return ((2 * unit - 1) * scale).astype(np.float32).reshape(shape)


def of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Weights by name: norms near 1, everything else small."""
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        is_norm = "norm" in name and name.endswith("weight")
        found[name] = values(shape, seed, 0.2 if is_norm else 0.25) + np.float32(is_norm)
    return found


def decoder(path: Path, tiny: Path, pooling: int) -> Path:
    """A llama of two layers with the embedded model's vocabulary, which adds a BOS, and causal attention."""
    tokens = {key: value for key, value in open_gguf_model(tiny).metadata.items() if key.startswith("tokenizer.ggml.")}
    n_vocab = len(tokens["tokenizer.ggml.tokens"].value)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH, WIDTH) for name in ("ffn_gate", "ffn_up", "ffn_down")}
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    metadata: Metadata = {**llama_metadata(2), **tokens, "llama.context_length": u32(512), "llama.pooling_type": u32(pooling)}
    return write_arrays(path, of_shapes(shapes), metadata)


def hybrid(path: Path, tiny: Path, pooling: int) -> Path:
    """The embedded model, said to pool: most of its layers have a recurrent state."""
    model = open_gguf_model(tiny)
    metadata = {**model.metadata, "qwen35moe.pooling_type": u32(pooling)}
    write_gguf(path, metadata, [_copied(tensor) for tensor in model.tensors])
    return path


def _copied(tensor: TensorSource) -> TensorJob:
    return TensorJob(tensor.name, tensor.shape, tensor.type, lambda: iter([tensor.raw(0, n_rows(tensor.shape))]))


def make_all(folder: Path, tiny: Path) -> dict[str, Path]:
    """Every way to pool on every kind of model. tiny: the embedded model's GGUF."""
    decoders = {f"decoder-{name}": decoder(folder / f"decoder-{name}.gguf", tiny, way) for name, way in (("mean", MEAN), ("last", LAST))}
    encoders = {f"encoder-{name}": encoder(folder / f"encoder-{name}.gguf", way) for name, way in (("mean", MEAN), ("cls", CLS))}
    return {**decoders, **encoders, "hybrid-last": hybrid(folder / "hybrid-last.gguf", tiny, LAST)}


# A text that is longer than a call, too.
TEXTS = ("the cat sat on the mat.", "a dog", "the blue dogs running, a red cat!", "is is is", "the cat " * 40)


def encoder(path: Path, pooling: int) -> Path:
    """A BERT of two layers: no cache, attention in both directions, a WordPiece vocabulary that puts [CLS] and [SEP] around a text."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w.removeprefix("##") if w.startswith("##") else f"▁{w}" for w in WORDS)]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), WIDTH), "token_types.weight": (2, WIDTH), "position_embd.weight": (128, WIDTH),
        "token_embd_norm.weight": (WIDTH,), "token_embd_norm.bias": (WIDTH,),
    }  # fmt: skip
    for layer in range(2):
        for name, rows in (("attn_q", 1), ("attn_k", 1), ("attn_v", 1), ("attn_output", 1), ("ffn_up", 2)):
            shapes |= {f"blk.{layer}.{name}.weight": (rows * WIDTH, WIDTH), f"blk.{layer}.{name}.bias": (rows * WIDTH,)}
        shapes |= {f"blk.{layer}.ffn_down.weight": (WIDTH, 2 * WIDTH), f"blk.{layer}.ffn_down.bias": (WIDTH,)}
        shapes |= {f"blk.{layer}.{n}.{kind}": (WIDTH,) for n in ("attn_output_norm", "layer_output_norm") for kind in ("weight", "bias")}
    metadata: Metadata = {
        "general.architecture": string("bert"),
        "bert.block_count": u32(2),
        "bert.context_length": u32(128),
        "bert.embedding_length": u32(WIDTH),
        "bert.feed_forward_length": u32(2 * WIDTH),
        "bert.attention.head_count": u32(2),
        "bert.attention.layer_norm_epsilon": f32(1e-12),
        "bert.attention.causal": boolean(False),
        "bert.pooling_type": u32(pooling),
        "tokenizer.ggml.model": string("bert"),
        "tokenizer.ggml.pre": string("jina-v2-en"),
        "tokenizer.ggml.tokens": array("str", tokens),
        "tokenizer.ggml.token_type": array("i32", [3] * 5 + [1] * len(WORDS)),
        "tokenizer.ggml.token_type_count": u32(2),
        "tokenizer.ggml.bos_token_id": u32(2),
        "tokenizer.ggml.eos_token_id": u32(3),
        "tokenizer.ggml.cls_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(1),
        "tokenizer.ggml.seperator_token_id": u32(3),
        "tokenizer.ggml.padding_token_id": u32(0),
        "tokenizer.ggml.mask_token_id": u32(4),
    }
    return write_arrays(path, of_shapes(shapes), metadata)
