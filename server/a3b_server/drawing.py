"""How a request wants its tokens drawn, over what the server and the model's makers want."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping

from a3b_gguf.llama.sampling import Grammar, Sampling
from a3b_server.errors import APIError
from a3b_server.fields import GenerationFields

SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_last_n",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold", "ignore_eos",
)  # fmt: skip
SEED_BITS = 0xFFFF_FFFF
MOST_DIGITS = 20  # of a token's number; Python reads no integer of thousands of them
LEAST_TEMPERATURE = 1e-6  # logits that are divided by less may leave the range of a float, and only exact ties could tell it from 0


def sampling_of(
    request: GenerationFields, default: Sampling, n_vocab: int, grammar: Grammar | None = None, n_logprobs: int | None = None
) -> Sampling:
    """The sampling of the request's first choice. Raises APIError 400 for a bias of a token that there is not."""
    chosen = {name: value for name in SAME_NAME if (value := getattr(request, name)) is not None}
    if request.repeat_penalty is not None:
        chosen["repetition_penalty"] = request.repeat_penalty
    if request.dry_breakers is not None:
        chosen["dry_breakers"] = tuple(request.dry_breakers)
    if chosen.get("temperature", 1) < LEAST_TEMPERATURE:
        chosen["temperature"] = 0.0
    seed = secrets.randbits(32) if request.seed is None else request.seed
    return dataclasses.replace(
        default,
        **chosen,
        seed=seed & SEED_BITS,
        logit_bias=_biases(request.logit_bias or {}, n_vocab),
        grammar=grammar,
        n_logprobs=n_logprobs,
    )


def of_choice(sampling: Sampling, index: int) -> Sampling:
    """The sampling of a further choice: the same but for its seed."""
    return dataclasses.replace(sampling, seed=(sampling.seed + index) & SEED_BITS)


def _biases(biases: Mapping[str, float], n_vocab: int) -> tuple[tuple[int, float], ...]:
    found = []
    for name, bias in biases.items():
        if not (name.isascii() and name.isdecimal()) or len(name) > MOST_DIGITS or int(name) >= n_vocab:
            raise APIError(400, f"logit_bias: {name[:20]!r} is no token; tokens are 0 to {n_vocab - 1:,}", "invalid_value", "logit_bias")
        found.append((int(name), bias))
    return tuple(found)
