"""Quality at the same bytes on tiny-a3b, its bf16 checkpoint the reference: allocation against llama-quantize's own IQ4_NL and Q4_K_M.

Calibrated and allocated on 120 chats of its corpus; measured on 120 other chats, and on the built-in text, which is nothing that the model
knows. All sides have the same importance matrix. Sensitivity is measured on the model, and, as for models too large for that, estimated
from the calibration, with constants that are SmolLM2's but for two. Limits: bytes within 0.5 %, mean KL divergence on the chats at least
25 % lower. Then the curve of KL divergence against bytes, KL by effort and by group size, and the speed of `a3b eval`.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from quality import CALIBRATION_SEED, HELD_OUT_SEED, THREADS, TINY, chats, evaluated, kl, made, run

from a3b_gguf.llama.log import LlamaLog
from a3b_quantize.imatrix import read_imatrix
from a3b_quantize.importance import plain_importance

STOCK = {"IQ4_NL": 25, "Q4_K_M": 15}
LEAST_GAIN, MOST_SIZE = 0.25, 0.005
CURVE = (3.5, 4.0, 4.5, 5.0, 6.0)


def stock(source: Path, output: Path, file_type: int, imatrix: Path) -> Path:
    """llama_model_quantize with an importance matrix, as llama-quantize --imatrix hands it over."""
    entries = {name: plain_importance(entry).reshape(-1) for name, entry in read_imatrix(imatrix).entries.items()}
    data = (C.llama_model_imatrix_data * (len(entries) + 1))()
    for slot, (name, values) in zip(data, entries.items(), strict=False):
        slot.name, slot.size = name.encode(), values.size
        slot.data = ctypes.cast(values.ctypes.data, type(slot.data))
    params = C.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 2
    params.imatrix = ctypes.cast(data, type(params.imatrix))
    with LlamaLog():
        status = C.llama_model_quantize(str(source).encode(), str(output).encode(), ctypes.byref(params))
    assert status == 0, output
    return output


class Bench:
    """The folder, the texts and the reference that all tables share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calibration, self.held_out = folder / "calibration.txt", folder / "held-out.txt"
        self.calibration.write_text(chats(120, CALIBRATION_SEED))
        self.held_out.write_text(chats(120, HELD_OUT_SEED))
        self.bf16 = made(folder, "bf16", "convert", TINY)
        run("calibrate", self.bf16, "--data", self.calibration, "-o", folder / "calibration")

    def quantized(self, name: str, *flags: object) -> Path:
        calibration = self.folder / "calibration"
        return made(self.folder, name, "quantize", self.bf16, "--no-bounds", "--calibration", calibration, *flags)

    def allocated(self, name: str, *flags: object) -> Path:
        return self.quantized(name, "--sensitivity-data", self.calibration, "--threads", THREADS, *flags)

    def chats(self, model: Path) -> dict[str, Any]:
        return evaluated(model, self.bf16, "--data", self.held_out, "--parse-special", "--cache", self.folder / "cache")

    def prose(self, model: Path) -> dict[str, Any]:
        return evaluated(model, self.bf16, "--cache", self.folder / "cache")


def same_bytes(bench: Bench) -> bool:
    """Prints ours against stock; whether a limit is missed."""
    print(f"{'':30}{'bytes':>12}{'KL, chats':>12}{'95 % interval':>22}{'99.9 %':>10}{'same top-1':>12}{'KL, prose':>11}")
    failed = False
    for name, number in STOCK.items():
        theirs = stock(bench.bf16, bench.folder / f"stock-{name}.gguf", number, bench.folder / "calibration" / "imatrix.gguf")
        size = theirs.stat().st_size
        ours = bench.allocated(f"ours-{name}", "--target-size", size)
        large = bench.quantized(f"large-{name}", "--target-size", size, "--sensitivity", "estimate")
        table = bench.quantized(f"table-{name}", "--target-size", size, "--sensitivity", "table")
        found = []
        for title, path in (
            (f"llama_model_quantize {name}", theirs),
            (f"a3b --target-size {size}", ours),
            ("  --sensitivity estimate", large),
            ("  --sensitivity table", table),
        ):
            chat, prose, n_bytes = bench.chats(path), bench.prose(path), path.stat().st_size
            mean = chat["scores"]["divergence"]["kl_mean"]
            interval = f"{mean['low']:.6f} to {mean['high']:.6f}"
            top = chat["scores"]["divergence"]["same_top_percent"]["value"]
            numbers = f"{mean['value']:12.6f}{interval:>22}{kl(chat, 'kl_p999'):10.4f}{top:12.3f}{kl(prose):11.6f}"
            print(f"{title:30}{n_bytes:12,}{numbers}", flush=True)
            found.append((kl(chat), kl(prose), n_bytes))
        limits = f"limits: at least {LEAST_GAIN:.0%} on chats, at most {MOST_SIZE:.1%} apart"
        for how, row, least in (("measured", found[1], LEAST_GAIN), ("estimated", found[2], LEAST_GAIN), ("by the table", found[3], -1)):
            gains = [1 - row[i] / found[0][i] for i in (0, 1)]
            off = abs(row[2] / size - 1)
            told = limits if least > 0 else "no limit"
            print(f"  {how}: KL {gains[0]:.1%} lower on chats, {gains[1]:.1%} on prose; {off:.3%} apart in bytes; {told}", flush=True)
            failed |= gains[0] < least or off > MOST_SIZE
    return failed


def curve(bench: Bench) -> None:
    print(f"\n{'KL against bytes':30}{'bytes':>12}{'KL, chats':>12}{'KL, prose':>12}")
    for bits in CURVE:
        path = bench.allocated(f"curve-{bits}", "--target-bpw", bits)
        print(f"{f'a3b --target-bpw {bits}':30}{path.stat().st_size:12,}{kl(bench.chats(path)):12.6f}{kl(bench.prose(path)):12.6f}")
    path = bench.quantized("recipe", "--type", "iq4_nl")
    print(f"{'a3b --type iq4_nl':30}{path.stat().st_size:12,}{kl(bench.chats(path)):12.6f}{kl(bench.prose(path)):12.6f}")


def by_flag(bench: Bench, title: str, flags: Mapping[str, tuple[object, ...]]) -> None:
    """KL of our iq4_nl recipe with other flags: the same bytes each time."""
    print(f"\n{title:30}{'bytes':>12}{'KL, chats':>12}{'KL, prose':>12}")
    for name, words in flags.items():
        path = bench.quantized(f"flag-{title}-{name}".replace(" ", "-"), "--type", "iq4_nl", *words)
        print(f"{name:30}{path.stat().st_size:12,}{kl(bench.chats(path)):12.6f}{kl(bench.prose(path)):12.6f}")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        failed = same_bytes(bench)
        curve(bench)
        by_flag(bench, "effort", {f"--effort {n}": ("--effort", n) for n in (1, 2, 3)})
        groups = {"32": (), "64": ("--group-size", "experts=64"), "128": ("--group-size", "experts=128")}
        by_flag(bench, "group size of experts", groups)
        speed = np.mean([bench.prose(bench.bf16)["tokens_per_second"] for _ in range(3)])
        print(f"\na3b eval of tiny-a3b in bf16 against its own distributions: {speed:,.0f} tokens/s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
