"""Vectors of the models of tests/pooling_models.py by llama.cpp's own server.

    python tests/golden/scripts/embeddings_llama_server.py LLAMA_SERVER

LLAMA_SERVER: the program that `make peers` builds. Writes tests/golden/embeddings_llama_server.json.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))
pooling_models: Any = importlib.import_module("pooling_models")
PORT = 18563
TRIES = 100_000


def main() -> None:
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        tiny = Path(name) / "tiny.gguf"
        subprocess.run([sys.executable, "-m", "a3b_gguf", "convert", ROOT / "models" / "tiny-a3b", "-o", tiny], check=True)
        for model, path in pooling_models.make_all(Path(name), tiny).items():
            words = [sys.argv[1], "-m", path, "--embedding", "--port", str(PORT), "-b", "512", "-ub", "512", "-np", "1", "-t", "1"]
            with subprocess.Popen([*words, "--no-webui"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
                try:
                    found[model] = [ask(text) for text in pooling_models.TEXTS]
                finally:
                    process.kill()
            sys.stdout.write(f"{model}: {len(found[model])} vectors of {len(found[model][0])}\n")
    path = ROOT / "tests" / "golden" / "embeddings_llama_server.json"
    lines = [f" {json.dumps(model)}: [\n  " + ",\n  ".join(map(json.dumps, vectors)) + "\n ]" for model, vectors in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def ask(text: str) -> list[float]:
    body = json.dumps({"input": text}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/embeddings", body, {"Content-Type": "application/json"})
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(request) as answer:
                return [round(value, 5) for value in json.load(answer)["data"][0]["embedding"]]
        except urllib.error.URLError:  # it is loading
            continue
    raise SystemExit("llama-server does not answer")


if __name__ == "__main__":
    main()
