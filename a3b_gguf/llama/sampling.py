"""How a request wants its tokens chosen. Values only, no llama_cpp."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LOGPROBS = 20  # alternatives that a request may ask for, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class Grammar:
    """GBNF that the answer must follow from rule `root` on.

    triggers: regular expressions; when there are any, text is free until one matches all of it from its start, and the grammar then
    holds from what the pattern's first group matched.
    """

    text: str
    root: str = "root"
    triggers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the most likely token. top_k 0, top_p 1, typical_p 1 and min_p 0 leave their step out. seed: 32 bits; all
    ones let llama.cpp draw one.

    penalty_last_n and dry_penalty_last_n: tokens that are looked back at, those of the prompt among them; 0: none, -1: all.
    repetition_penalty divides (or multiplies, below zero) the logits of tokens that occurred; frequency_penalty and presence_penalty
    are subtracted, once for each time and once. dry_*: https://github.com/oobabooga/text-generation-webui/pull/5677, off at 0.
    xtc_*: https://github.com/oobabooga/text-generation-webui/pull/6335, off at 0. logit_bias: (token, added to its logit).
    ignore_eos: tokens that end a generation are never drawn. n_logprobs: alternatives told with each token; None: no logprobs at all.
    The defaults are OpenAI's and llama.cpp's; a model file may bring its own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    n_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit wins, after penalties and bias where there are any."""
        return self.temperature <= 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty, self.dry_multiplier) != (1.0, 0.0, 0.0, 0.0)

    @property
    def is_argmax(self) -> bool:
        """Whether nothing stands between the logits and the choice, but for the ends of texts with ignore_eos."""
        return self.is_greedy and not (self.has_penalties or self.logit_bias or self.grammar)
