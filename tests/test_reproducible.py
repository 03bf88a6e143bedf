"""`--kv-split`: the same request gives the same bits, whatever else runs or ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from a3b_gguf.llama.params import LoadParams
from a3b_server.messages import Submit, TokenLogprobs, Tokens
from a3b_server.sampling import Sampling
from engine_bench import PARAMS, Bench, opened

SPLIT = replace(PARAMS, n_ctx=4096, kv_unified=False, reproducible=True)
SYSTEM = "<|im_start|>system\nAnswer shortly." + " Keep to the facts." * 30 + "<|im_end|>\n"


def request(bench: Bench, name: str, question: str, seed: int, max_tokens: int = 24) -> Submit:
    sampling = Sampling(temperature=1.3, seed=seed, n_logprobs=1, ignore_eos=True)
    return Submit(name, bench.text(SYSTEM) + bench.prompt(question), max_tokens, sampling, (len(bench.text(SYSTEM)),))


def logprobs(bench: Bench, name: str) -> list[tuple[int, TokenLogprobs | None]]:
    """Tokens and their logprobs: equal to the last bit only if the logits are."""
    return [
        (token, told)
        for event in bench.events
        if isinstance(event, Tokens)
        for (who, token), told in zip(event.pairs, event.logprobs, strict=True)
        if who == name
    ]


def alone(path: Path, params: LoadParams, question: str, seed: int, mtp: bool) -> list[tuple[int, TokenLogprobs | None]]:
    with opened(path, params, mtp, always=False) as bench:
        bench.ask(request(bench, "x", question, seed))
        return logprobs(bench, "x")


@pytest.mark.parametrize("n_draft", [0, 2])
def test_a_request_gets_the_same_bits_alone_among_others_and_after_others(tiny_bf16: Path, n_draft: int) -> None:
    params = replace(SPLIT, n_draft=n_draft, n_outputs_max=4 * (1 + n_draft))
    expected = alone(tiny_bf16, params, "Name a fruit.", 5, n_draft > 0)
    assert len(expected) == 24
    with opened(tiny_bf16, params, n_draft > 0, always=False) as bench:
        others = [request(bench, str(i), f"What is {i} plus 1?", i, 10 + 7 * i) for i in range(5)]
        for together in ([request(bench, "x", "Name a fruit.", 5), *others], [*others[:3], request(bench, "x", "Name a fruit.", 5)]):
            bench.ask(*together)
            assert logprobs(bench, "x") == expected
        assert bench.end("x").n_cached > 0  # although it started from what was read before
        bench.ask(request(bench, "x", "Name a fruit.", 5))
        assert logprobs(bench, "x") == expected
        bench.ask(request(bench, "x", "Name a fruit.", 6))
        assert logprobs(bench, "x") != expected
        if n_draft:
            assert bench.end("x").n_drafted
