"""One piece of memory of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# own: allocated; mapped: pages of the file, which the system may drop and read again; pinned: cannot be swapped out.
Held = Literal["own", "mapped", "pinned"]


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes of one kind on one device. exact: llama.cpp allocates this number; otherwise it is an estimate."""

    name: str
    device: str
    n_bytes: int
    exact: bool = True
    held: Held = "own"
