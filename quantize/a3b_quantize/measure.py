"""Measures a model's activation ranges on a short built-in text and writes clip_bounds.bin. Runs in a process of its own.

    python -m a3b_quantize.measure MODEL.gguf OUT THREADS

llama.cpp ends its process when something is wrong that it did not expect; nothing else may go down with it. Exit codes are those of a3b,
what went wrong is the last line of standard error.
"""

from __future__ import annotations

import ctypes
import hashlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from a3b_gguf import __version__
from a3b_gguf.clip_bounds import Bounds, Header
from a3b_gguf.errors import A3BError, BadInput
from a3b_gguf.gguf_file import GGUFFile
from a3b_gguf.llama.load import load_model
from a3b_gguf.llama.log import LlamaLog
from a3b_gguf.llama.params import LoadParams
from a3b_gguf.llama.vocab import Vocab
from a3b_gguf.llama.watch import watching
from a3b_gguf.model_id import file_sha256, model_id
from a3b_gguf.split import read_parts
from a3b_quantize.bounds import write_bounds
from a3b_quantize.sites import Sites, experts_by_layer, records

DATA_NAME = "a3b built-in text"
MAX_TOKENS = 512
PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h
ROWS = 64  # tokens in a batch: little memory beside a model that may only just fit


def measure(path: Path, n_threads: int = 1) -> Bounds:
    """Decodes the built-in text, at most MAX_TOKENS of it, with the model at `path`, and returns the ranges that were seen."""
    text = (files("a3b_quantize") / "sample.txt").read_text(encoding="utf-8")
    file, *others = read_parts(path)
    shapes = {info.name: info.shape for part in (file, *others) for info in part.tensors}
    sites = Sites(shapes, experts_by_layer(shapes))
    with load_model(path, LoadParams(n_ctx=MAX_TOKENS)) as model:
        tokens = Vocab(model).tokenize(text, parse_special=True)[:MAX_TOKENS]
        with watching(model, MAX_TOKENS, sites, n_threads, ROWS) as watch:
            watch.run(tokens)
    if not sites.histograms:
        raise BadInput(f"{path}: its graph has none of the nodes that are measured", f"architecture {file.architecture} is not known here")
    header = header_for(file, len(tokens), DATA_NAME, hashlib.sha256(text.encode()).hexdigest())
    return Bounds(header, records(sites.histograms))


def header_for(file: GGUFFile, n_tokens: int, data_name: str, data_sha256: str) -> Header:
    """The header of a measurement of `file`."""
    return Header(
        model=str(file.get("general.name", file.path.stem)),
        architecture=file.architecture,
        model_id=model_id(file),
        file_sha256=file_sha256(file),
        tokens=n_tokens,
        data_name=data_name,
        data_sha256=data_sha256,
        versions={"a3b": __version__, "llama-cpp-python": version("llama-cpp-python")},
    )


def _end_with_parent() -> None:
    """A parent that is killed has no time to end its child, which would go on for minutes and write a file that nobody waits for."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
    _end_with_parent()
    sys.exit(main(sys.argv[1:]))
