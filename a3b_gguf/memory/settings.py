"""The parameters of a context that decide how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """In llama.cpp's words. n_ctx: tokens of all sequences together, a multiple of 256; kv_unified: they share one cache."""

    n_ctx: int
    n_seq_max: int = 1
    n_ubatch: int = 512
    n_outputs_max: int = 1
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    kv_unified: bool = True
    use_mmap: bool = True

    @property
    def n_ctx_seq(self) -> int:
        """Tokens that one sequence sees, which is what a mask is wide."""
        return self.n_ctx if self.kv_unified else self.n_ctx // self.n_seq_max

    @property
    def n_rows(self) -> int:
        """Tokens of one graph."""
        return min(self.n_ctx, self.n_ubatch)


def padded(n_ctx: int) -> int:
    """A context as llama.cpp rounds it: up to a multiple of 256. Source: llama_context::llama_context, src/llama-context.cpp."""
    return -(-n_ctx // 256) * 256
