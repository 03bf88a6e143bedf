"""llama-quantize's own choice of types, tensor for tensor: `--stock`. The rules themselves are the table in `stock_rules`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.metadata import Metadata
from a3b_gguf.tensors import TYPES, GGMLType, Model, TensorSource
from a3b_quantize.assign import Assignment, fit, n_dims, roles
from a3b_quantize.file_types import FileType
from a3b_quantize.stock_rules import (
    CATEGORIES,
    FOREIGN,
    LAYERS_OF_70B,
    LOW,
    PROTECTED,
    PROTECTED_NAMES,
    ROWS,
    SMALL_OUTPUT,
    TOKEN_EMBD,
    Place,
)

BLOCK = re.compile(r"blk\.(\d+)")


@dataclass(frozen=True, slots=True)
class Dims:
    """What the rules ask of a model. n_gqa: query heads for a KV head in layer 0, n_layer: MTP blocks included."""

    architecture: str
    n_layer: int
    n_expert: int
    n_gqa: int
    is_70b: bool


def stock_assignments(model: Model, file_type: FileType, has_imatrix: bool = False, manual: Collection[str] = ()) -> tuple[Assignment, ...]:
    """The type that llama-quantize gives each tensor of `model` that is not in `manual`, in the model's order.

    manual: tensors that the user gives a type; as with llama-quantize's --tensor-type the rules do not count them.
    Source: llama_model_quantize_impl. Raises UsageError for an architecture whose own branches are not here, BadInput where
    llama-quantize itself gives up.
    """
    dims = model_dims(model.metadata)
    chooser = _Chooser(dims, file_type, has_imatrix, [tensor.name for tensor in model.tensors])
    # llama.cpp walks its tensors sorted by name, and the rules count as they go.
    ordered = sorted(model.tensors, key=lambda tensor: loader_order(tensor.name))
    decided = {tensor.name: chooser.decide(tensor) for tensor in ordered if tensor.name not in manual}
    role = roles(model)
    return tuple(
        Assignment(tensor.name, tensor.shape, tensor.type, kind, role[tensor.name], reason, fell_back)
        for tensor in model.tensors
        if tensor.name in decided
        for kind, reason, fell_back in (decided[tensor.name],)
    )


def loader_order(name: str) -> tuple[int, bytes]:
    """Where llama.cpp puts a tensor: by layer, then by the bytes of its name. Source: weight_name_comparer in llama-model-loader.h"""
    match = BLOCK.match(name)
    return (int(match[1]) if match else -1, name.encode())


def why_protected(name: str, shape: tuple[int, ...]) -> str:
    """Why llama-quantize leaves a tensor as it is, or "". Source: tensor_allows_quantization"""
    if n_dims(shape) < 2:
        return "one-dimensional"
    if not name.endswith("weight"):
        return "not a weight"
    part = next((part for part in PROTECTED if part in name), "")
    if part or name in PROTECTED_NAMES:
        return f"{part or name} is never quantized"
    return ""


def model_dims(metadata: Metadata) -> Dims:
    """The numbers that the rules ask for. Raises UsageError for an architecture of FOREIGN, BadInput for a missing key."""
    arch = str(metadata["general.architecture"].value)
    if arch in FOREIGN:
        raise UsageError(f"--stock does not know llama-quantize's own rules for {arch}", "leave --stock out, or use llama-quantize")
    if f"{arch}.block_count" not in metadata:
        raise BadInput(f"metadata key {arch}.block_count is missing")
    n_layer = int(_first(metadata, f"{arch}.block_count", 0))
    n_expert = int(_first(metadata, f"{arch}.expert_count", 0))
    n_head = int(_first(metadata, f"{arch}.attention.head_count", 0))
    n_head_kv = int(_first(metadata, f"{arch}.attention.head_count_kv", n_head))
    is_70b = LAYERS_OF_70B.get(arch) == n_layer
    if arch in ("llama", "llama-embed"):
        is_70b = n_layer == 80 and n_expert != 8 and n_head != n_head_kv
    return Dims(arch, n_layer, n_expert, n_head // n_head_kv if n_head_kv else 0, is_70b)


def _first(metadata: Metadata, key: str, default: int) -> Any:
    """A number, or the first of a per-layer array."""
    found = metadata.get(key)
    if found is None:
        return default
    return found.value[0] if found.kind == "arr" else found.value


def category_of(name: str) -> str:
    """The broad kind of tensor that the rules speak of. Source: tensor_get_category"""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "token_embd"
    return next((category for part, category in CATEGORIES if part in name), "other")


class _Chooser:
    """Owns the counters that llama-quantize carries from tensor to tensor (quantize_state_impl)."""

    def __init__(self, dims: Dims, file_type: FileType, has_imatrix: bool, names: Sequence[str]) -> None:
        self.dims, self.file_type = dims, file_type
        self.tied = "output.weight" not in names
        self.counts = dict.fromkeys(("attn_v", "ffn_down", "ffn_gate", "ffn_up"), 0)
        self.place = Place(
            layer=0, n_layer=dims.n_layer, i_down=0, i_attn_v=0, n_attn_v=sum(category_of(name) == "attn_v" for name in names),
            n_gqa=dims.n_gqa, n_expert=dims.n_expert, has_imatrix=has_imatrix,
        )  # fmt: skip

    def decide(self, tensor: TensorSource) -> tuple[GGMLType, str, bool]:
        """Type, reason, and whether the row did not fit. Source: llama_tensor_get_type"""
        protected = why_protected(tensor.name, tensor.shape)
        if protected:
            return tensor.type, f"llama-quantize: {protected}", False
        if self.file_type.type.is_float:
            return self.file_type.type, f"llama-quantize: {self.file_type.name}", False
        kind, why = self.choose(tensor)
        return fit(kind, tensor.shape[-1], f"llama-quantize: {why}")

    def choose(self, tensor: TensorSource) -> tuple[GGMLType, str]:
        """Source: llama_tensor_get_type_impl"""
        name, category = self.file_type.name, category_of(tensor.name)
        if category == "output" or (self.tied and category == "token_embd"):
            return self.output_type(tensor.shape[-1]), "output" if category == "output" else "embeddings that are also the output"
        if name == "mxfp4_moe":
            stacked = len(tensor.shape) > 2 and tensor.shape[-3] > 1
            return (TYPES["mxfp4"], "experts") if stacked else (TYPES["q8_0"], "not an expert")
        if category == "token_embd":
            return TYPES[TOKEN_EMBD.get(name, self.file_type.type.name)], "embeddings"
        kind, why = self.from_rows(tensor.name, category)
        if category in self.counts:
            self.counts[category] += 1
        return kind, why

    def output_type(self, n_cols: int) -> GGMLType:
        default = self.file_type.type
        if self.file_type.name == "mxfp4_moe" or n_cols % default.block or default.name == "q8_0":
            return TYPES["q8_0"]
        return TYPES["q5_k" if self.file_type.name in SMALL_OUTPUT else "q6_k"]

    def from_rows(self, name: str, category: str) -> tuple[GGMLType, str]:
        place = replace(self.place, layer=self.layer(name, category), i_down=self.counts["ffn_down"], i_attn_v=self.counts["attn_v"])
        kind, why = self.file_type.type, self.file_type.name
        for row in ROWS:
            if row.category == category and (not row.file_types or self.file_type.name in row.file_types) and row.test(place):
                kind, why = TYPES[row.type], row.why
                break
        return self.lifted(kind, why) if category == "attn_v" and self.file_type.name not in LOW else (kind, why)

    def lifted(self, kind: GGMLType, why: str) -> tuple[GGMLType, str]:
        """What happens to values after the other rules."""
        if self.dims.n_expert == 8:
            return TYPES["q8_0"], "values of an 8-expert model"
        if self.dims.is_70b and kind.name in ("q3_k", "q4_k"):
            return TYPES["q5_k"], "values of a 70B model"
        return kind, why

    def layer(self, name: str, category: str) -> int:
        """The layer of an FFN tensor: from its name where experts are, else how many like it came before."""
        if not category.startswith("ffn_"):
            return 0
        if self.dims.n_expert <= 1:
            return self.counts[category]
        match = BLOCK.match(name)
        if not match or int(match[1]) >= self.dims.n_layer:
            raise BadInput(f"tensor {name}: no layer from 0 to {self.dims.n_layer - 1} in its name", "look at block_count in the metadata")
        return int(match[1])
