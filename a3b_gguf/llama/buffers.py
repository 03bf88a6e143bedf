"""The memory that llama.cpp says it took, read from its log: the only place where it tells."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from a3b_gguf.units import MIB

if TYPE_CHECKING:  # llama.log loads llama_cpp, which a plan does without
    from a3b_gguf.llama.log import LogLine

KINDS = {"model": "model", "KV": "kv", "RS": "recurrent", "compute": "compute", "output": "output"}
PRINTED = re.compile(rf"(\S+) +({'|'.join(KINDS)}) buffer size = +([0-9.]+) MiB")


@dataclass(frozen=True, slots=True)
class Buffer:
    """kind: model, kv, recurrent, compute or output. device: llama.cpp's buffer type, like CPU_Mapped or CUDA0. Exact to 0.01 MiB."""

    kind: str
    device: str
    n_bytes: int


def printed_buffers(lines: Iterable[LogLine]) -> tuple[Buffer, ...]:
    """Buffers in the order in which they were printed; those of size 0 (a dry run's) are left out."""
    found = (PRINTED.search(line.text) for line in lines)
    buffers = (Buffer(KINDS[match[2]], match[1], round(float(match[3]) * MIB)) for match in found if match)
    return tuple(buffer for buffer in buffers if buffer.n_bytes)
