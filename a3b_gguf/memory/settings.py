"""The parameters of a context that decide how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """In llama.cpp's words. n_ctx: tokens of all sequences together, a multiple of 256; kv_unified: they share one cache.

    n_draft: tokens guessed ahead in each step; load_mtp: by the MTP block, in a context of its own. checkpoint_bytes: RAM for
    copies of recurrent states; text_bytes: for texts whose slot another request took. flash_attn: off is counted for a model in RAM only.
    """

    n_ctx: int
    n_seq_max: int = 1
    n_ubatch: int = 512
    n_outputs_max: int = 1
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    kv_unified: bool = True
    use_mmap: bool = True
    n_draft: int = 0
    load_mtp: bool = False
    checkpoint_bytes: int = 0
    text_bytes: int = 0
    flash_attn: bool = True

    @property
    def n_ctx_seq(self) -> int:
        """Tokens that one sequence sees, which is what a mask is wide."""
        return self.n_ctx if self.kv_unified else self.n_ctx // self.n_seq_max

    @property
    def n_rows(self) -> int:
        """Tokens of one graph."""
        return min(self.n_ctx, self.n_ubatch)

    @property
    def n_states(self) -> int:
        """Recurrent states kept: each sequence's own, and one more for each drafted token that may be taken back."""
        return self.n_seq_max * (1 + self.n_draft)


def padded(n_ctx: int) -> int:
    """A context as llama.cpp rounds it: up to a multiple of 256. Source: llama_context::llama_context, src/llama-context.cpp."""
    return -(-n_ctx // 256) * 256
