"""What shrinking and winsorizing an importance matrix are worth on the embedded model: where the defaults of importance.py come from.

    python benchmarks/bench_importance.py

For matrices of few and of many tokens: KL divergence of the quantized model from the bf16 one on held-out chats, and the error of the
expert weights under the importance that another, long text gives ("true"), which is far less noisy. Each number is a mean over several
short texts; +- is 1.96 standard errors of the difference from llama-quantize's plain values, on the same positions.

Limits: with the defaults the true error is at least 5 % below the plain one's at the fewest tokens, and nowhere 0.3 % above it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "models" / "tiny-a3b"))

from a3b_convert import convert  # noqa: E402
from a3b_gguf.gguf_file import read_gguf  # noqa: E402
from a3b_gguf.gguf_model import open_gguf_model, to_float32  # noqa: E402
from a3b_gguf.gguf_write import write_gguf  # noqa: E402
from a3b_gguf.llama.load import LoadedModel, load_model  # noqa: E402
from a3b_gguf.llama.log import LlamaLog  # noqa: E402
from a3b_gguf.llama.params import LoadParams  # noqa: E402
from a3b_gguf.llama.vocab import Vocab  # noqa: E402
from a3b_gguf.template import open_template  # noqa: E402
from a3b_gguf.tensors import TYPES, Model, n_rows  # noqa: E402
from a3b_quantize.base_logits import Key  # noqa: E402
from a3b_quantize.calibrate import Settings, calibrate  # noqa: E402
from a3b_quantize.calibration_data import chunks, read_sources  # noqa: E402
from a3b_quantize.encode import Encoding, jobs  # noqa: E402
from a3b_quantize.evaluate import compare_file, write_base  # noqa: E402
from a3b_quantize.imatrix import Imatrix  # noqa: E402
from a3b_quantize.importance import ImportanceOptions, importance_of  # noqa: E402
from a3b_quantize.inputs import entries  # noqa: E402
from a3b_quantize.policy import Choice, choose_policy  # noqa: E402
from a3b_quantize.weighting import Importance  # noqa: E402

N_CTX, EVAL_CHUNKS, TRUE_CHUNKS = 512, 16, 40
TOKENS = (16, 256, 8192)  # that a matrix is made from
REPEATS = {16: 4, 256: 3}  # texts of that length; else 1
PLAIN, NONE = ImportanceOptions(plain=True), ImportanceOptions(shared_prior=0, own_prior=0)
SHRINKAGE = {f"layer {shared}, own {own}": ImportanceOptions(shared_prior=shared, own_prior=own)
             for shared, own in ((0, 0), (16, 0), (64, 0), (16, 16), (16, 64))}  # fmt: skip
FLOORS = {f"floor {floor:g}": replace(NONE, floor=floor) for floor in (0.0, 1e-3, 1e-2, 1e-1)}
EXPERT_TYPES = ("iq4_nl", "q2_k")


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one text: as collected, and of capped squares."""

    plain: Imatrix
    winsorized: Imatrix


@dataclass(frozen=True, slots=True)
class Score:
    """kl: of each held-out position; error: of the expert weights, as a share of their weighted size."""

    kl: NDArray[np.float64]
    error: float

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share. true: importance of the experts' channels from a long text."""

    folder: Path
    model: Model
    tokens: NDArray[np.int32]
    key: Key
    true: Importance

    def score(self, importance: Importance | None, expert_type: str) -> Score:
        """Quantizes with this importance and compares with bf16."""
        assigned = choose_policy(Choice("iq4_nl")).assign(self.model, True).assignments
        kinds = [replace(each, type=TYPES[expert_type]) if "_exps." in each.name else each for each in assigned]
        path = self.folder / "quantized.gguf"
        write_gguf(path, self.model.metadata, jobs(self.model, kinds, Encoding(), importance))
        compared = compare_file(path, LoadParams(n_ctx=N_CTX), self.tokens, self.folder / "base", self.key, lambda done, total: None)
        return Score(np.concatenate([each.kl for each in compared]), self.error(path))

    def error(self, path: Path) -> float:
        """Squared error of the expert weights, weighted by the true importance, over their weighted squares."""
        lost = whole = 0.0
        quantized = {tensor.name: tensor for tensor in open_gguf_model(path).tensors}
        for tensor in self.model.tensors:
            if "_exps." not in tensor.name or tensor.name not in self.true or tensor.name.startswith("blk.4."):
                continue
            rows, other = n_rows(tensor.shape), quantized[tensor.name]
            weights = tensor.rows(0, rows).reshape(tensor.shape)
            found = to_float32(other.raw(0, rows), other.type).reshape(tensor.shape)
            importance = self.true[tensor.name][:, None, :]
            lost += float((importance * (weights - found) ** 2).sum(dtype=np.float64))
            whole += float((importance * weights**2).sum(dtype=np.float64))
        return lost / whole


def collect(model: LoadedModel, shapes: Mapping[str, tuple[int, ...]], texts: Sequence[Sequence[int]]) -> Matrices:
    state = calibrate(model, shapes, texts, Settings(N_CTX, winsorize=True)).state
    made = (Imatrix(entries(state.groups, state.group_of, capped), N_CTX, len(texts), ()) for capped in (False, True))
    return Matrices(*made)


def texts_of(data: Sequence[Sequence[int]], n_tokens: int, number: int) -> list[Sequence[int]]:
    """The `number`-th text of `n_tokens` from the chunks that the true importance does not use."""
    free = data[TRUE_CHUNKS:]
    if n_tokens < N_CTX:
        return [free[(7 * number) % len(free)][:n_tokens]]
    count = n_tokens // N_CTX
    return list(free[number * count : (number + 1) * count])


def prepared(folder: Path) -> tuple[Bench, dict[int, list[Matrices]]]:
    import corpus  # type: ignore[import-not-found]  # of the embedded model: the chats that it can do

    path = folder / "bf16.gguf"
    convert(ROOT / "models" / "tiny-a3b", path)
    shapes = {info.name: info.shape for info in read_gguf(path).tensors}
    template = open_template((ROOT / "models" / "tiny-a3b" / "chat_template.jinja").read_text(encoding="utf-8"))
    sources = read_sources((), lambda messages, tools: template.render(messages, tools, add_generation_prompt=False))
    with load_model(path, LoadParams(n_ctx=N_CTX)) as model:
        vocab = Vocab(model)
        data = chunks(sources, lambda text: vocab.tokenize(text, parse_special=True), N_CTX).tokens
        chats = [token for chat in islice(corpus.conversations(1000, 31337), 200) for token in vocab.tokenize(chat, parse_special=True)]
        tokens = np.array(chats[: N_CTX * EVAL_CHUNKS], np.int32).reshape(-1, N_CTX)
        key = Key("00", "00", N_CTX, len(tokens), vocab.n_tokens, 0)
        write_base(folder / "base", key, model, LoadParams(n_ctx=N_CTX), tokens, lambda done, total: None)
        true = collect(model, shapes, data[:TRUE_CHUNKS]).plain
        found = {n: [collect(model, shapes, texts_of(data, n, i)) for i in range(REPEATS.get(n, 1))] for n in TOKENS}
    source = open_gguf_model(path)
    return Bench(folder, source, tokens, key, importance_of(true, source, PLAIN)), found


def few(matrices: Sequence[Matrices]) -> str:
    counts = np.concatenate([entry.counts for name, entry in matrices[0].plain.entries.items() if "gate_exps" in name])
    return f"{np.median(counts):.0f} at the median expert, {int((counts == 0).sum())} of {len(counts)} unseen"


def rows(
    bench: Bench, matrices: Sequence[Matrices], kind: str, options: Mapping[str, tuple[ImportanceOptions, bool]]
) -> Iterator[tuple[str, float, float]]:
    """Prints a line for each of `options` (whether of capped squares: second) and yields name, KL and true error against plain's."""

    def scores(chosen: ImportanceOptions, winsorized: bool) -> list[Score]:
        made = [each.winsorized if winsorized else each.plain for each in matrices]
        return [bench.score(importance_of(each, bench.model, chosen), kind) for each in made]

    plain = scores(PLAIN, False)
    line = "  {:20} {:.6f} {:>24} {:8.5f} {:>8}"
    print(f"  {'':20} {'mean KL':8} {'against plain':>24} {'error':>8}")
    print(line.format("plain", np.mean([each.kl.mean() for each in plain]), "", np.mean([each.error for each in plain]), ""))
    for name, (chosen, winsorized) in options.items():
        found = scores(chosen, winsorized)
        change = np.concatenate([a.kl - b.kl for a, b in zip(found, plain, strict=True)])
        kl, error = (float(np.mean([getattr(each, what) for each in found])) for what in ("mean_kl", "error"))
        ratio = error / np.mean([each.error for each in plain]) - 1
        spread = 1.96 * change.std() / len(change) ** 0.5
        print(line.format(name, kl, f"{change.mean():+.6f} +- {spread:.6f}", error, f"{ratio:+.1%}"))
        yield name, kl, float(ratio)


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as name, LlamaLog():
        bench, found = prepared(Path(name))
        print(f"mean KL divergence over {bench.tokens.size // 2:,} positions; no importance matrix at all:")
        for kind in EXPERT_TYPES:
            none = bench.score(None, kind)
            print(f"  experts {kind:8} {none.kl.mean():.6f} +- {1.96 * none.kl.std() / len(none.kl) ** 0.5:.6f}, error {none.error:.5f}")
        default = {"default": (ImportanceOptions(), False)}
        for kind in EXPERT_TYPES:
            for n_tokens, matrices in found.items():
                print(f"\nshrinkage, experts {kind}, {n_tokens} tokens ({few(matrices)})")
                options = {key: (value, False) for key, value in SHRINKAGE.items()} | default
                last = list(rows(bench, matrices, kind, options))[-1]
                failed |= last[2] > (-0.05 if n_tokens == TOKENS[0] else 0.003)
        for n_tokens in (256, TOKENS[-1]):
            print(f"\nwinsorizing, experts q2_k, {n_tokens} tokens")
            list(rows(bench, found[n_tokens], "q2_k", default | {"winsorized": (ImportanceOptions(), True)}))
            print(f"\nfloor without shrinkage, experts q2_k, {n_tokens} tokens")
            list(rows(bench, found[n_tokens], "q2_k", {key: (value, False) for key, value in FLOORS.items()}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
