"""File types: what `general.file_type` can say, and the names that llama-quantize has for them.

Source: enum llama_ftype in llama.h, QUANT_OPTIONS in tools/quantize/quantize.cpp, llama_ftype_get_default_type in llama-quant.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from a3b_gguf.errors import UsageError
from a3b_gguf.tensors import TYPES, GGMLType


@dataclass(frozen=True, slots=True)
class FileType:
    """A file type of llama-quantize. type: the one that a tensor gets when no rule says otherwise."""

    name: str
    number: int
    type: GGMLType


FILE_TYPES: dict[str, FileType] = {
    name: FileType(name, number, TYPES[kind])
    for name, number, kind in (
        ("f32", 0, "f32"), ("f16", 1, "f16"), ("q4_0", 2, "q4_0"), ("q4_1", 3, "q4_1"), ("q8_0", 7, "q8_0"), ("q5_0", 8, "q5_0"),
        ("q5_1", 9, "q5_1"), ("q2_k", 10, "q2_k"), ("q3_k_s", 11, "q3_k"), ("q3_k_m", 12, "q3_k"), ("q3_k_l", 13, "q3_k"),
        ("q4_k_s", 14, "q4_k"), ("q4_k_m", 15, "q4_k"), ("q5_k_s", 16, "q5_k"), ("q5_k_m", 17, "q5_k"), ("q6_k", 18, "q6_k"),
        ("iq2_xxs", 19, "iq2_xxs"), ("iq2_xs", 20, "iq2_xs"), ("q2_k_s", 21, "q2_k"), ("iq3_xs", 22, "iq3_s"), ("iq3_xxs", 23, "iq3_xxs"),
        ("iq1_s", 24, "iq1_s"), ("iq4_nl", 25, "iq4_nl"), ("iq3_s", 26, "iq3_s"), ("iq3_m", 27, "iq3_s"), ("iq2_s", 28, "iq2_xs"),
        ("iq2_m", 29, "iq2_s"), ("iq4_xs", 30, "iq4_xs"), ("iq1_m", 31, "iq1_m"), ("bf16", 32, "bf16"), ("tq1_0", 36, "tq1_0"),
        ("tq2_0", 37, "tq2_0"), ("mxfp4_moe", 38, "mxfp4"), ("q1_0", 40, "q1_0"), ("q2_0", 41, "q2_0"),
    )
}  # fmt: skip
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}  # what llama-quantize takes these names for

# Which file type says that all matrices have one type, where the names differ. NVFP4 has a number but no llama-quantize name.
PLAIN_NUMBERS = {"q3_k": 11, "q4_k": 14, "q5_k": 16, "iq2_s": 29, "mxfp4": 38, "nvfp4": 39}


def file_type(name: str) -> FileType:
    """The file type that llama-quantize calls `name`, aliases included. Raises UsageError that lists the names."""
    name = name.lower()
    found = FILE_TYPES.get(ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"llama-quantize has no type {name!r}", f"with --stock: {', '.join(FILE_TYPES)}")
    return found


def plain_number(kind: GGMLType) -> int:
    """`general.file_type` of a file whose matrices all have type `kind`."""
    return PLAIN_NUMBERS[kind.name] if kind.name in PLAIN_NUMBERS else FILE_TYPES[kind.name].number
