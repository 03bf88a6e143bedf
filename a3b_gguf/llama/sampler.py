"""Draws a token from logits with llama.cpp's samplers."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import llama_cpp.llama_cpp as C

from a3b_gguf.llama.load import Context


class Sampler:
    """Owns a chain: top_k, top_p, min_p, temperature, then a draw. The order is llama-server's default.

    top_k 0, top_p 1 and min_p 0 leave their step out. Equal seeds and equal logits give equal tokens.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
        if temperature <= 0:
            raise ValueError("temperature 0 is argmax and needs no sampler")
        self._chain: Any = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        steps = []
        if top_k > 0:
            steps.append(C.llama_sampler_init_top_k(top_k))
        if top_p < 1:
            steps.append(C.llama_sampler_init_top_p(top_p, 1))
        if min_p > 0:
            steps.append(C.llama_sampler_init_min_p(min_p, 1))
        steps += [C.llama_sampler_init_temp(temperature), C.llama_sampler_init_dist(seed & 0xFFFF_FFFF)]
        for step in steps:
            C.llama_sampler_chain_add(self._chain, step)  # the chain frees its steps

    def sample(self, context: Context, row: int) -> int:
        """Draws from the logits of a row of the last batch, and remembers the token as accepted."""
        return int(C.llama_sampler_sample(self._chain, context.pointer, row))

    def close(self) -> None:
        if self._chain:
            C.llama_sampler_free(self._chain)
            self._chain = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
