"""How a request wants its tokens chosen: the values that the samplers of a3b_gguf.llama obey."""

from a3b_gguf.llama.sampling import MOST_LOGPROBS, Grammar, Sampling

__all__ = ["MOST_LOGPROBS", "Grammar", "Sampling"]
