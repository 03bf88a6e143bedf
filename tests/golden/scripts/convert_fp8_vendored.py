"""What llama.cpp's own converter makes of the random FP8 checkpoints of tests/fp8.py, as auto (which becomes bf16) and as f32.

    python tests/golden/scripts/convert_fp8_vendored.py SDIST

SDIST: the unpacked source of llama-cpp-python 0.3.36. Needs torch and transformers. Writes tests/golden/convert_fp8.json.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import vendored

sys.path.insert(0, str(vendored.ROOT / "tests"))
import fp8


def main() -> None:
    vendored.use(Path(sys.argv[1]))
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.gguf"
        for name, (scales, form) in fp8.GOLDEN_FORMS.items():
            checkpoint = fp8.write_fp8(Path(folder) / name / "tiny", scales, form)
            for outtype in ("auto", "f32"):
                vendored.convert(checkpoint, out, outtype, *(["--no-mtp"] if form.arch != "qwen3moe" and not form.mtp else []))
                golden[f"{name}: {outtype}"] = vendored.tensors(out)
    vendored.write("convert_fp8.json", golden)


if __name__ == "__main__":
    main()
