"""Makes tests/golden/eval/llama_perplexity.json: what llama-perplexity prints for tiny-a3b on tests/golden/eval/chats.txt.

    python tests/golden/scripts/perplexity_llama.py LLAMA_PERPLEXITY LLAMA_QUANTIZE TINY_BF16.gguf

LLAMA_PERPLEXITY and LLAMA_QUANTIZE: the programs that `make peers` builds; TINY_BF16.gguf: `a3b convert models/tiny-a3b --type bf16`.
The text itself: `corpus.conversations(30, 2024)` of models/tiny-a3b, joined by line breaks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "eval"
TEXT = FOLDER / "chats.txt"
PERPLEXITY = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
# what we call a number -> the line that llama-perplexity --kl-divergence prints
LINES = {
    "perplexity": r"Mean PPL\(Q\) *: *(\S+) ± *(\S+)",
    "kl_mean": r"Mean +KLD: *(\S+) ± *(\S+)",
    "kl_max": r"Maximum KLD: *(\S+)",
    "kl_p999": r"99\.9% +KLD: *(\S+)",
    "kl_p99": r"99\.0% +KLD: *(\S+)",
    "kl_median": r"Median +KLD: *(\S+)",
    "p_change_mean": r"Mean +Δp: *(\S+) ± *(\S+) %",
    "p_change_rms": r"RMS Δp +: *(\S+) ± *(\S+) %",
    "same_top_percent": r"Same top p: *(\S+) ± *(\S+) %",
}


def said(program: str, model: Path, *flags: object) -> str:
    """What it printed. Its log is written by a thread that its end may cut off: then it runs again."""
    command = [program, "-m", str(model), "-f", str(TEXT), "-t", "2", *map(str, flags)]
    for _ in range(10):
        with tempfile.TemporaryFile("w+") as out:
            subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=True)
            out.seek(0)
            text = out.read()
        if PERPLEXITY.search(text) or "Same top p:" in text:
            return text
    raise RuntimeError(f"{' '.join(command)} never printed its result")


def perplexity(text: str) -> list[float]:
    found = PERPLEXITY.search(text)
    assert found, text[-2000:]
    return [float(found[1]), float(found[2])]


def main() -> None:
    program, quantize, model = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    result = {
        "ctx 512": perplexity(said(program, model, "-c", 512)),
        "ctx 200": perplexity(said(program, model, "-c", 200, "-b", 200)),
        "kv q8_0": perplexity(said(program, model, "-c", 512, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")),
        "1 expert": perplexity(said(program, model, "-c", 512, "--override-kv", "qwen35moe.expert_used_count=int:1")),
    }
    with tempfile.TemporaryDirectory() as folder:
        small, base = Path(folder) / "small.gguf", Path(folder) / "base"
        subprocess.run([quantize, model, small, "IQ4_NL", "2"], check=True, capture_output=True)
        said(program, model, "-c", 512, "--kl-divergence-base", base)
        printed = said(program, small, "-c", 512, "--kl-divergence-base", base, "--kl-divergence")
    divergence = {}
    for name, line in LINES.items():
        found = re.search(line, printed)
        assert found, (name, printed[-3000:])
        divergence[name] = [float(value) for value in found.groups()]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    golden = {"made_with": (version.stdout + version.stderr).strip().splitlines()[0], "perplexity": result, "iq4_nl": divergence}
    (FOLDER / "llama_perplexity.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
