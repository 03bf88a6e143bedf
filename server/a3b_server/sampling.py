"""How a request wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the most likely token. top_k 0, top_p 1 and min_p 0 leave their step out. seed: 32 bits; all
    ones let llama.cpp draw one.

    The defaults are OpenAI's; a model file may bring its own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0 or self.top_k == 1
