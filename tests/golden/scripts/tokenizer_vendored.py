"""What llama.cpp's own converter writes for the tokenizers of tests/tokenizer_variants.py.

    python tests/golden/scripts/tokenizer_vendored.py SDIST

SDIST: the unpacked source of llama-cpp-python 0.3.36. Needs torch and transformers. Writes tests/golden/tokenizer_variants.json.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vendored

sys.path.insert(0, str(vendored.ROOT / "tests"))
import tokenizer_variants


class Writer:
    """Stands for a GGUFWriter: remembers the keys that SpecialVocab would write."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_"):
            raise AttributeError(name)
        return lambda value: self.said.update({name.removeprefix("add_"): value})


def facts(folder: Path) -> dict[str, Any]:
    """Every token that is not normal, a hash of all, and the special ids."""
    base: Any = importlib.import_module("conversion.base")
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    model = SimpleNamespace(dir_model=folder, hparams=config, get_vocab_base_pre=lambda tokenizer: "qwen35")
    model.does_token_look_special = lambda token: base.TextModel.does_token_look_special(model, token)
    tokens, kinds, _ = base.TextModel.get_vocab_base(model)
    writer = Writer()
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)
    merges = writer.said.pop("token_merges")
    writer.said.pop("chat_template")
    return {
        "tokens": [[i, token, int(kind)] for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != 1],
        "tokens_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        "merges_sha256": hashlib.sha256(json.dumps(merges).encode()).hexdigest(),
        "special": writer.said,
    }


def main() -> None:
    vendored.use(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        golden = {
            name: facts(tokenizer_variants.write_variant(vendored.CHECKPOINT, Path(folder) / str(number), name))
            for number, name in enumerate(tokenizer_variants.VARIANTS)
        }
    vendored.write("tokenizer_variants.json", golden)


if __name__ == "__main__":
    main()
