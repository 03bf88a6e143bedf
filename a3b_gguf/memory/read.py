"""Reads Facts from the header of a GGUF file, and refuses one that llama.cpp could not load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

from a3b_gguf.errors import BadInput
from a3b_gguf.gguf_file import GGUFFile, TensorInfo
from a3b_gguf.memory.facts import Facts, Layer
from a3b_gguf.metadata import SkippedArray
from a3b_gguf.roles import EXPERT_ROLES, layer_of, role_of

HYBRID = ("qwen35moe", "qwen35", "qwen3next")  # DeltaNet and attention layers by turns
FAMILY = ("qwen35moe", "qwen3moe", "qwen3next")
KNOWN = (*HYBRID, "qwen3moe", "qwen2moe", "qwen3", "qwen2", "llama", "smollm3")
# Types whose rows llama.cpp interleaves for its CPU kernels when no GPU is in use, on any common CPU of x86 (AVX2) or ARM.
# Source: ggml_repack_get_optimal_repack_type in ggml/src/ggml-cpu/repack.cpp
REPACKED = ("q4_0", "q4_k", "iq4_nl", "mxfp4")
REPACK_ROWS = 8
MAX_LAYERS, MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS of src/llama-hparams.h


def facts_of(file: GGUFFile, shards: Sequence[GGUFFile] = ()) -> Facts:
    """Facts of `file`; shards: the other files of a split model. Raises BadInput when the tensors are not those that llama.cpp needs."""
    return _Reader(file, [*file.tensors, *(tensor for shard in shards for tensor in shard.tensors)]).facts()


def pooling_type(file: GGUFFile) -> int | None:
    """The way in which the model makes one vector of a text, a value of enum llama_pooling_type; None for one that writes text."""
    value = file.get(f"{file.architecture}.pooling_type")
    return None if value in (None, 0, -1, 0xFFFF_FFFF) else value


class _Reader:
    """The header of one model, with checks on every number that a formula multiplies."""

    def __init__(self, file: GGUFFile, tensors: list[TensorInfo]) -> None:
        self.file, self.arch = file, file.architecture
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.notes: list[str] = []

    def number(self, key: str, default: int | None = None, least: int = 0) -> int:
        """The architecture's integer `key`, the largest where each layer has its own.

        Raises BadInput when it is missing without a default, or no count.
        """
        value = self.file.hparam(key, default) if default is not None else self.file.need_hparam(key)
        if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            value = max(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 32:
            raise BadInput(f"{self.file.path}: {self.arch}.{key} is {shown(value)}, expected a whole number from {least}")
        return value

    def per_layer(self, key: str, default: int, n_layers: int) -> list[int]:
        """A count `key` of each layer: the file may give one value for all, or an array. Booleans count as 0 and 1."""
        value: Any = self.file.hparam(key, default)
        values = value[:n_layers] if isinstance(value, list) else [value] * n_layers
        if len(values) < n_layers:
            raise BadInput(f"{self.file.path}: {self.arch}.{key} has {len(values)} values, the model {n_layers} layers")
        if not all(isinstance(v, int) and 0 <= v < 1 << 32 for v in values):
            raise BadInput(f"{self.file.path}: {self.arch}.{key} holds something that is no count: {shown(value)}")
        return values

    def facts(self) -> Facts:
        n_all, n_nextn = self.number("block_count", least=1), self.number("nextn_predict_layers", 0)
        self.check_blocks(n_all, n_nextn)
        n_trunk = n_all - n_nextn
        n_embd, n_head = self.number("embedding_length", least=1), self.number("attention.head_count", 0)
        k_dim = self.number("attention.key_length", n_embd // max(n_head, 1))
        layers, outside = self.layers(n_all, n_trunk), self.outside_blocks()
        inner, state, groups, kernel, heads = self.state_sizes(any(layer.recurrent for layer in layers))
        channels = inner + 2 * groups * state
        self.note_unknowns(layers)
        n_expert, n_used, n_ff_expert = self.expert_sizes(any(layer.experts for layer in layers))
        return Facts(
            path=self.file.path,
            architecture=self.arch,
            name=str(self.file.get("general.name", self.file.path.stem)),
            n_ctx_train=self.number("context_length", least=1),
            n_embd=n_embd,
            n_vocab=self.n_vocab(),
            n_head=n_head,
            k_dim=k_dim,
            v_dim=self.number("attention.value_length", n_embd // max(n_head, 1)),
            n_expert=n_expert,
            n_expert_used=n_used,
            n_ff=self.number("feed_forward_length", 0),
            n_ff_expert=n_ff_expert,
            n_ff_shared=self.number("expert_shared_feed_forward_length", 0),
            conv_channels=channels,
            conv_state=max(0, kernel - 1) * channels,
            ssm_state=state * inner,
            ssm_inner=inner,
            ssm_heads=heads,
            embedding_bytes=sum(outside["embedding"]),
            output_bytes=sum(outside["output"]),
            other_bytes=sum(sum(sizes) for role, sizes in outside.items() if role not in ("embedding", "output")),
            layers=tuple(layers[:n_trunk]),
            nextn=tuple(layers[n_trunk:]),
            pools=pooling_type(self.file) is not None,
            notes=tuple(self.notes),
        )

    def state_sizes(self, needed: bool) -> tuple[int, int, int, int, int]:
        """inner size, state size, groups, kernel, heads: all at least 1 where a layer keeps a state."""
        keys = ("inner_size", "state_size", "group_count", "conv_kernel", "time_step_rank")
        found = [self.number(f"ssm.{key}", None if needed else 0, least=int(needed)) for key in keys]
        return found[0], found[1], found[2], found[3], found[4]

    def expert_sizes(self, needed: bool) -> tuple[int, int, int]:
        """Experts, those used for a token, and their width; some architectures give the width as feed_forward_length."""
        if not needed:
            return 0, 0, self.number("expert_feed_forward_length", 0)
        n_expert, n_used = self.number("expert_count", least=1), self.number("expert_used_count", least=1)
        if n_used > n_expert or n_expert > MAX_EXPERTS:
            hint = f"llama.cpp loads at most {MAX_EXPERTS} experts, all or some of them used"
            raise BadInput(f"{self.file.path}: a token uses {n_used:,} of {n_expert:,} experts", hint)
        default = self.number("feed_forward_length", 0) or None if self.arch not in FAMILY else None
        return n_expert, n_used, self.number("expert_feed_forward_length", default, least=1)

    def check_blocks(self, n_all: int, n_nextn: int) -> None:
        """Every block that the metadata counts must be in the file: llama.cpp demands MTP tensors even when it skips them."""
        if n_all > MAX_LAYERS:
            raise BadInput(f"{self.file.path}: block_count is {n_all:,}, llama.cpp loads at most {MAX_LAYERS}", "convert the model again")
        if n_nextn >= n_all:
            raise BadInput(f"{self.file.path}: {n_nextn} MTP blocks of {n_all} blocks in all: the model itself is not in this file")
        present = {layer for name in self.tensors if (layer := layer_of(name)) is not None}
        missing = sorted(set(range(n_all)) - present)
        if missing and missing[0] >= n_all - n_nextn:
            raise BadInput(
                f"{self.file.path}: nextn_predict_layers is {n_nextn} and block_count {n_all}, but the file has no tensor "
                f"blk.{missing[0]}.*: the MTP block was left out and the metadata was not changed",
                "convert the model again with --no-mtp, or from a checkpoint that has the MTP weights",
            )
        extra = sorted(present - set(range(n_all)))
        if missing or extra:
            what = f"there is no tensor blk.{missing[0]}.*" if missing else f"there are tensors blk.{extra[0]}.*"
            raise BadInput(f"{self.file.path}: block_count is {n_all}, but {what}", "convert the model again")

    def n_vocab(self) -> int:
        """llama.cpp counts the tokens of the tokenizer; the embedding has a row for each."""
        tokens = self.file.get("tokenizer.ggml.tokens")
        if isinstance(tokens, SkippedArray):
            return tokens.count
        embedding = self.tensors.get("token_embd.weight")
        return len(tokens) if isinstance(tokens, list) else embedding.shape[0] if embedding else 0

    def recurrent(self, n_all: int, n_trunk: int) -> list[bool]:
        """Source: load_arch_hparams in src/models/qwen35moe.cpp and qwen3next.cpp."""
        if self.arch not in HYBRID:
            return [False] * n_all
        listed = self.file.hparam("attention.recurrent_layers")
        if isinstance(listed, list):
            return [bool(flag) for flag in self.per_layer("attention.recurrent_layers", 0, n_all)]
        interval = self.number("full_attention_interval", 4, least=1)
        return [i < n_trunk and (i + 1) % interval != 0 for i in range(n_all)]

    def layers(self, n_all: int, n_trunk: int) -> list[Layer]:
        recurrent, default = self.recurrent(n_all, n_trunk), self.number("attention.head_count", 0)
        heads = self.per_layer("attention.head_count_kv", default, n_all)
        tensors: list[list[TensorInfo]] = [[] for _ in range(n_all)]
        for name, tensor in self.tensors.items():
            if (index := layer_of(name)) is not None:
                tensors[index].append(tensor)
        for i, flag in enumerate(recurrent):
            has_state = any(".ssm_" in tensor.name for tensor in tensors[i])
            if self.arch in HYBRID and has_state != flag:
                kinds = ("an attention layer", "a DeltaNet layer")
                raise BadInput(f"{self.file.path}: the metadata calls layer {i} {kinds[flag]}, its tensors make it {kinds[has_state]}")
        return [layer_facts(tensors[i], recurrent[i], 0 if recurrent[i] else heads[i]) for i in range(n_all)]

    def outside_blocks(self) -> dict[str, list[int]]:
        """Bytes of the tensors that belong to no block, by role."""
        found: dict[str, list[int]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            if layer_of(name) is None:
                found[role_of(name)].append(tensor.nbytes)
        return found

    def note_unknowns(self, layers: list[Layer]) -> None:
        """Says what the formulas do not cover, instead of guessing it."""
        if self.arch not in KNOWN:
            self.notes.append(f"a3b was not checked with the architecture {self.arch}: its compute buffers are guessed from its widths")
        if self.file.hparam("attention.sliding_window"):
            self.notes.append("sliding-window layers are counted as if they kept the whole context")
        if self.file.hparam("attention.kv_lora_rank"):
            self.notes.append("the compressed cache of multi-head latent attention is counted as a full one, which is too much")
        if self.file.hparam("ssm.state_size") and self.arch not in HYBRID:
            self.notes.append("which layers keep a recurrent state is not known for this architecture: none is counted")
        if not any(layer.n_head_kv for layer in layers):
            self.notes.append("no layer with a KV cache was found")


def layer_facts(tensors: Sequence[TensorInfo], recurrent: bool, n_head_kv: int) -> Layer:
    """Sums of one block's tensors by role."""
    experts = [tensor for tensor in tensors if role_of(tensor.name) in EXPERT_ROLES and tensor.name.endswith(".weight")]
    small = [t for t in tensors if t not in experts and (len(t.shape) == 1 or role_of(t.name) in ("norm", "gates", "conv"))]
    dense = [tensor for tensor in tensors if tensor not in experts and tensor not in small]
    return Layer(
        recurrent=recurrent,
        n_head_kv=n_head_kv,
        expert_tensors=named_sizes(experts),
        expert_weights=sum(prod(tensor.shape) for tensor in experts),
        dense=sum(tensor.nbytes for tensor in dense),
        dense_tensors=named_sizes([tensor for tensor in tensors if tensor not in experts and len(tensor.shape) > 1]),
        dense_weights=sum(prod(tensor.shape) for tensor in dense),
        norms=sum(tensor.nbytes for tensor in small),
        repacked=sum(tensor.nbytes for tensor in tensors if is_repacked(tensor)),
    )


def named_sizes(tensors: Sequence[TensorInfo]) -> tuple[tuple[str, int], ...]:
    """(name without "blk.N." and ".weight", bytes) of each."""
    return tuple((tensor.name.split(".")[2], tensor.nbytes) for tensor in tensors)


def is_repacked(tensor: TensorInfo) -> bool:
    return tensor.type.name in REPACKED and len(tensor.shape) > 1 and tensor.shape[-2] % REPACK_ROWS == 0


def shown(value: object) -> str:
    return "an array" if isinstance(value, (list, SkippedArray)) else repr(value)
