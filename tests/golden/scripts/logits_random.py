"""Logits of the random checkpoints of tests/forms.py by the Hugging Face implementation in float32, for random tokens.

    python tests/golden/scripts/logits_random.py

Needs torch and transformers. Writes tests/golden/logits_random.npz. To be run again whenever tests/tiny.py makes other weights.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))
forms: Any = importlib.import_module("forms")
tiny: Any = importlib.import_module("tiny")
N_TOKENS, POSITIONS, N_PROMPTS = 48, 6, 3


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (form, sizes) in forms.COMPUTED.items():
            checkpoint = tiny.write_checkpoint(Path(folder) / name, form, sizes)
            architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
            kind = getattr(transformers, architecture)
            model, info = kind.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
            missing = [key for key in info["missing_keys"] if "visual" not in key]
            if missing or info["mismatched_keys"]:
                raise SystemExit(f"{name}: {missing or info['mismatched_keys']}")
            for number in range(N_PROMPTS):
                tokens = np.random.default_rng(number).integers(0, sizes.vocab - 64, N_TOKENS)
                with torch.no_grad():
                    logits = model.eval()(torch.tensor(tokens[None])).logits[0, -POSITIONS:]
                arrays[f"{name} tokens {number}"], arrays[f"{name} logits {number}"] = tokens.astype(np.int32), logits.numpy()
                sys.stdout.write(f"{name}: logits from {logits.min():.2f} to {logits.max():.2f}\n")
    path = ROOT / "tests" / "golden" / "logits_random.npz"
    np.savez_compressed(path, **arrays)
    sys.stdout.write(f"{path}: {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
