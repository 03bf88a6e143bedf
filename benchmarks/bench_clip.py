"""What --clip costs and does: decoding speed without it, watching, and clamping; and how far clamping moves the model's answers.

    python benchmarks/bench_clip.py [MODEL.gguf CLIP_BOUNDS.bin]        default: the embedded model, quantized for this run

Fails when watching costs more than 10 % of the speed, since it is meant for a server that works.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from a3b_gguf.flows.clipping import clip_config
from a3b_gguf.llama.batch import Batch, decode, drop, logits
from a3b_gguf.llama.load import load_model, open_context
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_server.clip import Clip, Mode

N_TOKENS, N_ROUNDS = 256, 4
MOST_WATCH_COST = 0.10
ROOT = Path(__file__).parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) == 3:
            model, bounds = Path(sys.argv[1]), Path(sys.argv[2])
        else:
            model, bounds = Path(folder) / "tiny.gguf", Path(folder) / "clip_bounds.bin"
            command = [sys.executable, "-m", "a3b_gguf", "quantize", str(ROOT / "models/tiny-a3b"), "--type", "iq4_nl", "-o", str(model)]
            subprocess.run(command, check=True, capture_output=True)
        return compare(model, bounds)


def compare(model: Path, bounds: Path) -> int:
    rows: dict[str, tuple[float, NDArray[np.float64]]] = {}
    modes: tuple[Mode | None, ...] = (None, "watch", "enforce")
    seconds = {mode: [] for mode in modes}  # type: dict[Mode | None, list[float]]
    with ExitStack() as opened:
        runs = {mode: opened.enter_context(Run(model, bounds, mode)) for mode in modes}
        for _ in range(N_ROUNDS):  # in turn, so that a busy moment meets all of them
            for mode in modes:
                seconds[mode].append(runs[mode].seconds())
        for mode in modes:
            rows[str(mode or "none")] = min(seconds[mode]), runs[mode].log_softmax()
    base_seconds, base = rows["none"]
    print(f"{'--clip':8} {'tokens/s':>9} {'cost':>7} {'mean KL to none':>16} {'same top-1':>11}")
    for name, (best, found) in rows.items():
        divergence = float((np.exp(base) * (base - found)).sum(axis=1).mean())
        same = float((base.argmax(axis=1) == found.argmax(axis=1)).mean())
        print(f"{name:8} {N_TOKENS / best:9,.0f} {best / base_seconds - 1:7.1%} {divergence:16.2e} {same:11.1%}")
    cost = rows["watch"][0] / base_seconds - 1
    print(f"watching costs {cost:.1%}, at most {MOST_WATCH_COST:.0%}")
    return int(cost > MOST_WATCH_COST)


class Run:
    """A context with its clip, that decodes the same text token by token."""

    def __init__(self, path: Path, bounds: Path, mode: Mode | None) -> None:
        load = LoadParams(n_ctx=512, n_batch=64, n_ubatch=64, use_mmap=False, n_threads=2, n_threads_batch=2)
        config = clip_config(path, bounds, mode) if mode else None
        self.clip = Clip(config) if config else None
        self._owned = ExitStack()
        self._model = self._owned.enter_context(load_model(path, load))
        self._context = self._owned.enter_context(open_context(self._model, load, self.clip.gate if self.clip else None))
        vocab = Vocab(self._model)
        text = "What is the capital of Chile? The capital of Chile is Santiago. Spell the word river. r i v e r. " * 20
        self._tokens, self._n_vocab, self._batch = vocab.tokenize(text, False)[:N_TOKENS], vocab.n_tokens, Batch(64)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def seconds(self) -> float:
        started = time.perf_counter()
        self._decode(lambda row: None)
        return time.perf_counter() - started

    def log_softmax(self) -> NDArray[np.float64]:
        rows: list[NDArray[np.float64]] = []
        self._decode(lambda row: rows.append(np.array(logits(self._context, row, self._n_vocab), np.float64)))
        found = np.array(rows)
        found -= found.max(axis=1, keepdims=True)
        found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
        return found

    def _decode(self, keep: object) -> None:
        assert callable(keep)
        drop(self._context, 0)
        for position, token in enumerate(self._tokens):
            self._batch.clear()
            row = self._batch.add(0, position, [token], 1)
            if self.clip:
                self.clip.turn()
            if decode(self._context, self._batch):
                raise SystemExit("llama_decode failed")
            keep(row)


if __name__ == "__main__":
    sys.exit(main())
