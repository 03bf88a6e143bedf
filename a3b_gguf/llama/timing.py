"""How fast a model runs under LoadParams: loaded for real in a process of its own, one short prompt, a few tokens.

    python -m a3b_gguf.llama.timing MODEL.gguf < load_params.json
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from a3b_gguf.errors import MachineLacks
from a3b_gguf.llama.child import answer, ask
from a3b_gguf.llama.params import LoadParams

N_PROMPT, N_DECODE, N_ROUNDS = 512, 32, 2
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Timing:
    """prefill, decode: tokens a second of the best round; free: bytes that each GPU had left while it ran; load_seconds: to load."""

    prefill: float
    decode: float
    load_seconds: float
    free: tuple[tuple[str, int], ...] = ()

    def turn_seconds(self, n_prompt: int, n_answer: int) -> float:
        return n_prompt / self.prefill + n_answer / self.decode


def time_model(path: Path, load: LoadParams) -> Timing:
    """Raises what loading raises, and MachineLacks when the child ends without an answer."""
    told = ask("a3b_gguf.llama.timing", path, load, TIMEOUT_SECONDS, "leave --measure out")
    return Timing(told["prefill"], told["decode"], told["load_seconds"], tuple((name, free) for name, free in told["free"]))


def measure(path: Path, load: LoadParams) -> Timing:
    """Loads `path` and runs it in this process."""
    from a3b_gguf.llama.batch import Batch, decode, drop
    from a3b_gguf.llama.devices import gpus
    from a3b_gguf.llama.load import load_model, open_context
    from a3b_gguf.llama.vocab import Vocab

    started = time.perf_counter()
    with load_model(path, load) as model, open_context(model, load) as context:
        load_seconds = time.perf_counter() - started
        n_vocab = Vocab(model).n_tokens
        n_prompt = min(N_PROMPT, load.n_ctx - N_DECODE)
        prompt = [(7919 * i + 13) % n_vocab for i in range(n_prompt)]  # spread over the vocabulary, and so over the experts
        batch = Batch(load.n_batch)

        def run(tokens: list[int], pos: int) -> None:
            for start in range(0, len(tokens), load.n_batch):
                part = tokens[start : start + load.n_batch]
                batch.clear()
                batch.add(0, pos + start, part, 1)
                code = decode(context, batch)
                if code:
                    raise MachineLacks(f"llama.cpp answered {code} while {path} was measured", "ask for less context")

        prefill, decoding = [], []
        run(prompt[:8], 0)  # warms up: pages of the file, pools of the device
        for _ in range(N_ROUNDS):
            drop(context, 0)
            started = time.perf_counter()
            run(prompt, 0)
            prefill.append(time.perf_counter() - started)
            started = time.perf_counter()
            for i in range(N_DECODE):
                run([prompt[i % n_prompt]], n_prompt + i)
            decoding.append(time.perf_counter() - started)
        free = tuple((device.name, device.free) for device in gpus()) if load.n_gpu_layers else ()
        return Timing(n_prompt / min(prefill), N_DECODE / min(decoding), load_seconds, free)


if __name__ == "__main__":
    answer(lambda path, load: asdict(measure(path, load)))
