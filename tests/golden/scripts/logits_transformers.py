"""Logits of models/tiny-a3b by the Hugging Face implementation in float32, for a few prompts.

    python tests/golden/scripts/logits_transformers.py

Needs torch and transformers. Writes tests/golden/logits_tiny_a3b.npz. To be run again whenever models/tiny-a3b/model.safetensors changes.
Each prompt is one forward pass of fewer than 64 tokens: one chunk of the DeltaNet layers, and one batch of llama.cpp.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "models" / "tiny-a3b"
POSITIONS = 6  # logits are kept of the last ones
SYSTEM = "You are a helpful assistant."
TOOL = {"type": "function", "function": {"name": "add"}}
CHATS: tuple[tuple[list[dict[str, str]], list[dict[str, Any]] | None], ...] = (
    ([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the capital of Chile?"}], None),
    ([{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 12 plus 30?"}], None),
    ([{"role": "user", "content": "Spell the word table."}, {"role": "assistant", "content": "t, a, b, l, e"}], None),
    ([{"role": "user", "content": "Add 2 and 3."}], [TOOL]),
    (
        [{"role": "system", "content": "Answer in capital letters."}, {"role": "user", "content": "Größe, naïve, 你好, \u00a0x\n\n1234"}],
        None,
    ),
)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = Qwen3_5MoeForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, attn_implementation="eager").eval()
    arrays: dict[str, Any] = {"safetensors_sha256": hashlib.sha256((CHECKPOINT / "model.safetensors").read_bytes()).hexdigest()}
    for number, (messages, tools) in enumerate(CHATS):
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        if not 20 <= len(tokens) < 64:
            raise SystemExit(f"prompt {number} has {len(tokens)} tokens, wanted 20 to 63")
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -POSITIONS:]
        arrays[f"text_{number}"], arrays[f"tokens_{number}"] = text, np.array(tokens, np.int32)
        arrays[f"logits_{number}"] = logits.numpy().astype(np.float32)
    path = ROOT / "tests" / "golden" / "logits_tiny_a3b.npz"
    np.savez_compressed(path, **arrays)
    sys.stdout.write(f"{path}: {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
