"""Measures a model's activation ranges on a short built-in text and writes clip_bounds.bin. Runs in a process of its own.

    python -m a3b_quantize.measure MODEL.gguf OUT THREADS

llama.cpp ends its process when something is wrong that it did not expect; nothing else may go down with it. Exit codes are those of a3b,
what went wrong is the last line of standard error.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from a3b_gguf.errors import A3BError, BadInput
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.llama.watch import watch
from a3b_gguf.split import read_parts
from a3b_quantize.bounds import Bounds, Header, file_sha256, model_id, record, write_bounds
from a3b_quantize.sites import Collector

DATA_NAME = "a3b built-in text"
MAX_TOKENS = 512


def measure(path: Path, n_threads: int = 1) -> Bounds:
    """Decodes the built-in text, at most MAX_TOKENS of it, with the model at `path`, and returns the ranges that were seen."""
    text = (files("a3b_quantize") / "sample.txt").read_text(encoding="utf-8")
    file, *others = read_parts(path)
    collector = Collector(info.name for part in (file, *others) for info in part.tensors)
    with load_model(path, LoadParams(n_ctx=MAX_TOKENS)) as model:
        tokens = Vocab(model).tokenize(text, parse_special=True)[:MAX_TOKENS]
        watch(model, tokens, collector.wanted, collector.receive, n_threads)
    if not collector.histograms:
        raise BadInput(f"{path}: its graph has none of the nodes that are measured", f"architecture {file.architecture} is not known here")
    records = tuple(record(layer, site, expert, seen) for layer, site, expert, seen in collector.ordered())
    return Bounds(_header(file, len(tokens), text), records)


def _header(file: GGUFFile, n_tokens: int, text: str) -> Header:
    return Header(
        model=str(file.get("general.name", file.path.stem)),
        architecture=file.architecture,
        model_id=model_id(file),
        file_sha256=file_sha256(file),
        tokens=n_tokens,
        data_name=DATA_NAME,
        data_sha256=hashlib.sha256(text.encode()).hexdigest(),
        versions={"a3b": version("a3b"), "llama-cpp-python": version("llama-cpp-python")},
    )


def main(arguments: Sequence[str]) -> int:
    """Entry of the child process. Returns its exit code."""
    path, out, n_threads = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    with LlamaLog():  # keeps standard error for what went wrong
        try:
            found = measure(path, n_threads)
            write_bounds(out, found.header, found.records)
        except A3BError as error:
            sys.stderr.write(error.message + "\n")
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
