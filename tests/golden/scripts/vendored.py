"""Runs llama.cpp's own converter, vendored in the source of llama-cpp-python, and reads back what it wrote."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
CHECKPOINT = ROOT / "models" / "tiny-a3b"
KINDS = {"UINT32": "u32", "INT32": "i32", "FLOAT32": "f32", "BOOL": "bool", "STRING": "str", "ARRAY": "arr", "UINT64": "u64"}
INLINE = 64  # longer arrays are kept as a hash


def use(sdist: Path) -> None:
    """Puts the converter on the path. It refuses tokenizers whose hash it has not seen, so that check is replaced by its answers."""
    source = sdist / "vendor" / "llama.cpp"
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base: Any = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer(self.dir_model)


def pre_tokenizer(folder: Path) -> str:
    """Its name for the two regexes of the family: only Qwen3.5's has marks (\\p{M}) in words."""
    return "qwen35" if "\\\\p{M}" in (folder / "tokenizer.json").read_text(encoding="utf-8") else "qwen2"


def convert(folder: Path, output: Path, outtype: str, *options: str) -> None:
    program: Any = importlib.import_module("convert_hf_to_gguf")
    arguments, sys.argv = sys.argv, ["convert", str(folder), "--outfile", str(output), "--outtype", outtype, *options]
    program.main()
    sys.argv = arguments
    base: Any = importlib.import_module("conversion.base")
    for model in base.ModelBase._model_classes[base.ModelType.TEXT].values():
        model.no_mtp = model.mtp_only = False  # --no-mtp and --mtp set them on the class, for good


def metadata(path: Path) -> dict[str, Any]:
    """key -> kind, item and value; a long array's count and sha256 (of its JSON) instead of its value."""
    gguf: Any = importlib.import_module("gguf")
    out: dict[str, Any] = {}
    for key, field in gguf.GGUFReader(path).fields.items():
        if key.startswith("GGUF."):
            continue
        kinds, value = [KINDS[kind.name] for kind in field.types], field.contents()
        entry: dict[str, Any] = {"kind": kinds[0], "item": kinds[1] if len(kinds) > 1 else ""}
        if isinstance(value, list) and len(value) > INLINE:
            entry |= {"count": len(value), "sha256": hashlib.sha256(json.dumps(value).encode()).hexdigest()}
        else:
            entry["value"] = value
        out[key] = entry
    return out


def tensors(path: Path) -> dict[str, Any]:
    """name -> type, shape (columns last) and sha256 of the bytes; of ssm_a, which is an exponential, the values."""
    gguf: Any = importlib.import_module("gguf")
    out: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        entry: dict[str, Any] = {"type": tensor.tensor_type.name.lower(), "shape": [int(n) for n in reversed(tensor.shape)]}
        if tensor.name.endswith("ssm_a"):
            entry["values"] = [float(value) for value in np.asarray(tensor.data, np.float32)]
        else:
            entry["sha256"] = hashlib.sha256(tensor.data.tobytes()).hexdigest()
        out[tensor.name] = entry
    return out


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(name: str, value: dict[str, Any]) -> None:
    """One line a tensor or key, so that a change reads well."""
    path = GOLDEN / name
    lines = []
    for key, entry in value.items():
        if isinstance(entry, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entry.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(entry)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"{path}: {path.stat().st_size:,} bytes\n")
