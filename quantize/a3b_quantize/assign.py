"""Which type each tensor gets, and why: the value that every way of choosing ends in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from a3b_gguf.errors import BadInput, UsageError
from a3b_gguf.roles import roles_of
from a3b_gguf.tensors import TYPES, GGMLType, Model

# What replaces a type whose block does not divide the row. Source: tensor_type_fallback in llama-quant.cpp
FALLBACK: dict[str, str] = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q2_0", "q2_k", "q3_k", "tq1_0", "tq2_0"), "q4_0"),
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip
# Types that come out as garbage without an importance matrix. Source: tensor_requires_imatrix in llama-quant.cpp
NEED_IMPORTANCE = ("iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class Assignment:
    """The decision about one tensor. source: the type it has; type: the type it gets; reason: the rule that said so.

    group_size: weights that share one scale, a multiple of 32; 64 and 128 tie the scales of neighbouring blocks of iq4_nl.
    """

    name: str
    shape: tuple[int, ...]
    source: GGMLType
    type: GGMLType
    role: str
    reason: str
    fell_back: bool = False
    group_size: int = 32

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(self.shape)

    @property
    def n_weights(self) -> int:
        return prod(self.shape)


def n_dims(shape: tuple[int, ...]) -> int:
    """Dimensions as ggml_n_dims counts them: leading ones of a row-major shape do not count, so [1, 256] is a vector."""
    leading = next((i for i, size in enumerate(shape) if size > 1), len(shape) - 1)
    return len(shape) - leading


def fit(kind: GGMLType, n_cols: int, reason: str) -> tuple[GGMLType, str, bool]:
    """`kind`, or what llama.cpp writes instead where its block does not divide a row of `n_cols`: type, reason, whether it fell back.

    Raises BadInput for a type that llama.cpp has no replacement for.
    """
    if n_cols % kind.block == 0:
        return kind, reason, False
    name = FALLBACK.get(kind.name, kind.name)
    if name == kind.name and kind.block > 32:
        raise BadInput(f"rows of {n_cols} do not fit {kind.name} blocks of {kind.block}, and no type is known that replaces it")
    if n_cols % TYPES[name].block:
        name = "f16"
    return TYPES[name], f"{reason}; rows of {n_cols} do not fit {kind.name} blocks of {kind.block}, so {name}", True


def refuse_unweighted(assignments: Sequence[Assignment], file_type_name: str, weighted: Collection[str] = ()) -> None:
    """Raises UsageError when a tensor that is not among `weighted` would need an importance matrix, as llama-quantize does."""
    for each in assignments:
        needs = each.type.name in NEED_IMPORTANCE or (each.type.name == "q2_k" and file_type_name == "q2_k_s")
        if not needs or each.source == each.type or each.name in EMBEDDINGS or each.name in weighted:
            continue
        if weighted:
            raise UsageError(
                f"{each.name} would become {each.type.name}, which is garbage without importance, and the matrix has none for it",
                f"calibrate again, or give it another type, such as --tensor-type '^{each.name.replace('.', chr(92) + '.')}$=q4_k'",
            )
        raise UsageError(
            f"{each.name} would become {each.type.name}, which is garbage without an importance matrix",
            "add --imatrix or --calibration, or choose a type of at least 3.4 bits, such as iq4_nl, q4_k_m, q3_k or iq3_s",
        )


def roles(model: Model) -> dict[str, str]:
    """The role of every tensor of `model`."""
    return roles_of(tensor.name for tensor in model.tensors)
