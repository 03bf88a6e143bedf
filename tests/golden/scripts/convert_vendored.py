"""What llama.cpp's own converter makes of models/tiny-a3b (bf16 and f32) and of the random checkpoints of tests/tiny.py.

    python tests/golden/scripts/convert_vendored.py SDIST

SDIST: the unpacked source of llama-cpp-python 0.3.36. Needs torch and transformers. Writes tests/golden/convert_tiny_a3b.json and
convert_forms.json. To be run again whenever models/tiny-a3b/model.safetensors changes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import vendored

sys.path.insert(0, str(vendored.ROOT / "tests"))
import forms
import tiny

HYBRIDS = ("qwen35moe", "qwen3next")  # the others have no such option


def main() -> None:
    vendored.use(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.gguf"
        golden: dict[str, Any] = {"safetensors_sha256": vendored.sha256(vendored.CHECKPOINT / "model.safetensors")}
        for outtype in ("bf16", "f32"):
            vendored.convert(vendored.CHECKPOINT, out, outtype)
            golden[f"metadata_{outtype}"], golden[outtype] = vendored.metadata(out), vendored.tensors(out)
        vendored.write("convert_tiny_a3b.json", golden)
        random: dict[str, Any] = {}
        for name, (form, sizes) in forms.FORMS.items():
            checkpoint = tiny.write_checkpoint(Path(folder) / name / "tiny", form, sizes)
            vendored.convert(checkpoint, out, "auto", *(["--no-mtp"] if form.arch in HYBRIDS and not form.mtp else []))
            random[f"{name} metadata"], random[name] = vendored.metadata(out), vendored.tensors(out)
        for name, (form, sizes) in forms.DRAFTS.items():
            vendored.convert(tiny.write_checkpoint(Path(folder) / name / "tiny", form, sizes), out, "auto", "--mtp")
            random[f"{name} metadata"], random[name] = vendored.metadata(out), vendored.tensors(out)
        vendored.write("convert_forms.json", random)


if __name__ == "__main__":
    main()
